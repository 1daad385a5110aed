// Has a prompt prefilled by one worker and decoded greedily by another. Prints the output tokens.
//     node prefill_and_decode.mjs PREFILL_HOST:PORT DECODE_HOST:PORT 1,2,3 [NUM [SECRET_FILE]]
import assert from 'node:assert/strict';
import { randomUUID } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { reorder, withConnection } from './kvproto.mjs';
import { xxh3 } from './xxh3.mjs';

const ELEMENT_NBYTES = { float64: 8, float32: 4, float16: 2, bfloat16: 2 };
const digestsOf = (kv) => BigUint64Array.from(kv, ({ rows }) => xxh3(Buffer.concat(rows)));
const numbersOf = (bytes) => new Uint32Array(Uint8Array.from(bytes).buffer);

/** Room for the regions of all layers of a DESCRIPTION: a row of each token that is needed. */
const roomFor = ({ layers, dtype }, numTokens) =>
  layers.flatMap(({ name: layer, window_tokens: window, regions }) =>
    regions.map(({ num_heads: heads, head_dim: dim, per }) => {
      const n = ELEMENT_NBYTES[dtype];
      assert(n && per === 'token', `${layer}: no room for ${dtype} per ${per} here`);
      const first = window ? Math.max(0, numTokens - window) : 0;
      const shape = (1n << 52n) | (BigInt(heads) << 40n) | (BigInt(dim) << 28n);
      return { layer, first, shape, elementNbytes: n, rowNbytes: heads * dim * n, rows: [] };
    }));

/** Keeps the rows of a WRITE, still in its sender's byte order. */
function land(kv, { layer, first_token: firstToken, num_tokens: numTokens }, body) {
  let at = 0;
  for (const { first, rowNbytes, rows } of kv.filter((region) => region.layer === layer)) {
    const end = at + numTokens * rowNbytes;
    assert(first + rows.length === firstToken && end <= body.length, `${layer}: not next`);
    for (; at < end; at += rowNbytes) rows.push(body.subarray(at, at + rowNbytes));
  }
}

/** The KV of all `tokens`, checked and acknowledged. */
async function prefill({ send, receive }, tokens) {
  const transfer = { sequence_id: randomUUID(), generation: 1 };
  await send('DESCRIBE', {});
  const kv = roomFor((await receive()).fields, tokens.length);
  await send('PREFILL', { ...transfer, tokens: Uint32Array.from(tokens), timeout_s: 60 });
  for (;;) {
    const { kind, fields, body, order } = await receive();
    if (kind === 'WRITE') land(kv, fields, body);
    if (kind !== 'COMMIT') continue;
    const isRight = reorder(Buffer.from(digestsOf(kv).buffer), 8, order).equals(fields.digests);
    const refusal = { ...transfer, code: 12, message: 'the KV has other digests here' };
    await (isRight ? send('COMMIT_ACK', transfer) : send('ABORT', refusal));
    assert(isRight, refusal.message);
    for (const { rows, elementNbytes: n } of kv) rows.forEach((row) => reorder(row, n, order));
    return kv;
  }
}

/** Answers the PREFILL of a decode worker: the KV goes into the memory that it has leased. */
async function push({ send, remote }, { sequence_id, generation, tokens }, kv) {
  const transfer = { sequence_id, generation };
  await send('STARTED', { ...transfer, queue_s: 0 });
  for (const layer of new Set(kv.map((region) => region.layer))) {
    const regions = kv.filter((region) => region.layer === layer);
    const [{ first, shape, rows: { length } }] = regions;
    const tokenNbytes = regions.reduce((sum, { rowNbytes }) => sum + rowNbytes, 0);
    const step = Math.max(1, Math.floor((Number(remote.max_payload_nbytes) - 4096) / tokenNbytes));
    for (let at = 0; at < length; at += step) {
      const count = Math.min(step, length - at);
      const body = Buffer.concat(regions.flatMap(({ rows }) => rows.slice(at, at + count)));
      const write = { ...transfer, layer, first_token: first + at, num_tokens: count };
      await send('WRITE', write, body, shape | BigInt(count));
    }
  }
  const nbytes = kv.reduce((sum, { rows, rowNbytes }) => sum + rows.length * rowNbytes, 0);
  const counts = { num_tokens: tokens.length / 4, nbytes, queue_s: 0, prefill_s: 0, handoff_s: 0 };
  await send('COMMIT', { ...transfer, ...counts, digests: digestsOf(kv) });
}

/** What a decode worker makes of `tokens`. It asks for the KV on the way. */
async function decode(worker, tokens, num, kv) {
  await worker.send('GENERATE', {
    sequence_id: randomUUID(), tokens: Uint32Array.from(tokens), num_prompt_tokens: tokens.length,
    max_output_tokens: Number(num), temperature: 0, top_p: 1, top_k: 0, seed: 0, ignore_eos: false,
    stop_token_ids: Buffer.of(), prefill_workers: [], kv_from_sender: true, timeout_s: 60,
  });
  const output = [];
  for (;;) {
    const { kind, fields, order } = await worker.receive();
    if (kind === 'PREFILL') await push(worker, fields, kv);
    if (kind === 'TOKENS') output.push(...numbersOf(reorder(fields.tokens, 4, order)));
    if (kind !== 'FINISHED') continue;
    assert(!fields.code, `decode ended with code ${fields.code}: ${fields.message}`);
    return { tokens: output, timings: fields.timings };
  }
}

const [prefillAt, decodeAt, list, num = '16', secretFile] = process.argv.slice(2);
const tokens = list.split(',').map(Number);
const secret = secretFile && readFileSync(secretFile, 'utf8').trim();
// The last token stays out: decode computes it itself, and with it the first output token.
const kv = await withConnection(prefillAt, secret, (peer) => prefill(peer, tokens.slice(0, -1)));
const result = await withConnection(decodeAt, secret, (peer) => decode(peer, tokens, num, kv));
console.log(JSON.stringify(result));
