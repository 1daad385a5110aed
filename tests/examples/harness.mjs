/**
 * Calls the JavaScript implementation for the tests: a JSON list of tasks on standard input, the
 * list of their results on standard output. Bytes are {bytes: hex}, packed words {u32: [...]} and
 * {u64: [...]}, integers beyond 2^53 {big: text}.
 */
import { readFileSync } from 'node:fs';
import { encodeFrame, readFrame, reorder } from '../../examples/kvproto.mjs';
import { xxh3 } from '../../examples/xxh3.mjs';

function revive(_, value) {
  if (typeof value?.bytes === 'string') return Buffer.from(value.bytes, 'hex');
  if (value?.u32) return Uint32Array.from(value.u32);
  if (value?.u64) return BigUint64Array.from(value.u64, BigInt);
  return typeof value?.big === 'string' ? BigInt(value.big) : value;
}

function show(value) {
  if (typeof value === 'bigint') return { big: `${value}` };
  if (ArrayBuffer.isView(value)) return { bytes: value.toString('hex') };
  if (Array.isArray(value)) return value.map(show);
  if (value === null || typeof value !== 'object') return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, show(item)]));
}

const TASKS = {
  xxh3: ({ data }) => xxh3(data),
  reorder: ({ data, elementNbytes, order }) => reorder(data, elementNbytes, order),
  encode: ({ kind, fields, body, shapeWord }) => encodeFrame(kind, fields, body, BigInt(shapeWord)),
  decode: async ({ data, maxPayloadNbytes }) => {
    let at = 0;
    const read = async (nbytes) => data.subarray(at, (at += nbytes));
    const { kind, fields, body, order, shapeWord } = await readFrame(read, maxPayloadNbytes);
    return { kind, fields, body, order, shapeWord: `${shapeWord}` };
  },
};

const results = [];
for (const { task, ...options } of JSON.parse(readFileSync(0, 'utf8'), revive)) {
  try {
    results.push({ result: show(await TASKS[task](options)) });
  } catch (error) {
    results.push({ error: error.message });
  }
}
process.stdout.write(JSON.stringify(results));
