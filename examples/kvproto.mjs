// Frames and handshake of docs/wire.md with Node's standard library alone: reads both byte orders,
// writes the host's. What is wrong throws an error and ends the connection. [n]: a section there.
import assert from 'node:assert/strict';
import { createHash, createHmac, randomBytes, timingSafeEqual } from 'node:crypto';
import { on } from 'node:events';
import net from 'node:net';
import { xxh3 } from './xxh3.mjs';

const HOST_ORDER = new Uint8Array(Uint16Array.of(1).buffer)[0] === 1 ? 1 : 2;
const MAX_PAYLOAD_NBYTES = 1 << 26;
const KINDS = {
  HELLO: 1, AUTH: 2, ERROR: 3, PING: 4, PONG: 5, DESCRIBE: 11, DESCRIPTION: 12, PREFILL: 16,
  STARTED: 17, WRITE: 18, COMMIT: 19, COMMIT_ACK: 20, ABORT: 21, HEARTBEAT: 24, GENERATE: 32,
  ACCEPTED: 33, TOKENS: 34, FINISHED: 35,
};
const check = (bytes) => xxh3(bytes) & 0xffffffffn;
const bytesOf = (words) => Buffer.from(words.buffer, words.byteOffset, words.byteLength);
/** Reverses each element of `n` bytes in a Buffer, in place, unless `order` is the host's. */
export const reorder = (bytes, n, order) =>
  order === HOST_ORDER || n === 1 ? bytes : bytes[`swap${8 * n}`]();

/** A value as msgpack in the widest form of its type; a typed array becomes packed words. */
function pack(value) {
  const sized = (t, n, all) => Buffer.concat([Buffer.of(t, n >> 24, n >> 16, n >> 8, n), ...all]);
  if (typeof value === 'boolean') return Buffer.of(value ? 0xc3 : 0xc2);
  if (typeof value === 'string') return pack(Buffer.from(value)).fill(0xdb, 0, 1);
  if (ArrayBuffer.isView(value)) return sized(0xc6, value.byteLength, [bytesOf(value)]);
  if (Array.isArray(value)) return sized(0xdd, value.length, value.map(pack));
  const entries = Object.entries(value);
  if (typeof value === 'object') return sized(0xdf, entries.length, entries.flat().map(pack));
  return Buffer.concat([Buffer.of(0xcf), reorder(bytesOf(BigUint64Array.of(BigInt(value))), 8, 2)]);
}

/** The msgpack map in a Buffer. Integers that a Number cannot hold are BigInt. */
function unpack(bytes) {
  let at = 0;
  const take = (nbytes) => bytes.subarray(at, (at += nbytes)); // past the end: refused below
  const narrow = (big) => (BigInt(Number(big)) === big ? Number(big) : big);
  const uint = (n) => narrow(BigInt(`0x0${take(n).toString('hex')}`));
  const int = (n) => narrow(BigInt.asIntN(8 * n, BigInt(uint(n))));
  const array = (n, read = value) => Array.from({ length: n }, () => read());
  const map = (n) => Object.fromEntries(array(n, () => [value(), value()]));
  const types = [ // the first tag of each type, and what its n-th tag means, if it is allowed
    [0xe0, (n) => n - 32], [0xde, (n) => map(uint(2 << n))], [0xdc, (n) => array(uint(2 << n))],
    [0xd9, (n) => take(uint(1 << n)).toString()], [0xd4], [0xd0, (n) => int(1 << n)],
    [0xcc, (n) => uint(1 << n)], [0xcb, () => take(8).readDoubleBE()], [0xc7],
    [0xc4, (n) => take(uint(1 << n))], [0xc2, Boolean], [0xc1], [0xc0, () => null],
    [0xa0, (n) => take(n).toString()], [0x90, array], [0x80, map], [0, (n) => n],
  ];
  const value = () => {
    const tag = uint(1);
    const [first, read] = types.find(([from]) => from <= tag);
    assert(read && at <= bytes.length, `a descriptor is cut off or has the tag ${tag}`);
    return read(tag - first);
  };
  const fields = value();
  assert(at === bytes.length && fields?.constructor === Object, 'a descriptor is one map');
  return fields;
}

/** The bytes of one frame [2, 3]. The payload check leaves out the body of a WRITE. */
export function encodeFrame(kind, fields, body = Buffer.alloc(0), shapeWord = 0n) {
  const [descriptor, flags] = [pack(fields), kind === 'WRITE' ? 1 : 0];
  const padding = Buffer.alloc(body.length && -(36 + descriptor.length) & 63);
  const start = Buffer.concat([bytesOf(Uint32Array.of(descriptor.length)), descriptor, padding]);
  const sizes = bytesOf(BigUint64Array.of(BigInt(start.length + body.length), shapeWord));
  const head = Buffer.of(0xde, 0xad, 0xbe, 0xaf, 1, HOST_ORDER, KINDS[kind], flags, ...sizes);
  const checksum = (check(head) << 32n) | check(flags ? start : Buffer.concat([start, body]));
  return Buffer.concat([head, bytesOf(BigUint64Array.of(checksum)), start, body]);
}

/** The next frame; `read` gives the next so many bytes. Checked in the order of [2]. */
export async function readFrame(read, maxPayloadNbytes) {
  const raw = await read(32);
  const [version, order, number, flags] = raw.subarray(4);
  assert(raw.readUInt32BE() === 0xdeadbeaf, 'a frame does not begin with DE AD BE AF');
  assert(version === 1, `wire version ${version}`);
  assert(order === 1 || order === 2, `byte order ${order}`);
  const end = order === 1 ? 'LE' : 'BE';
  const [nbytes, shapeWord, checksum] = [8, 16, 24].map((at) => raw[`readBigUInt64${end}`](at));
  assert(checksum >> 32n === check(raw.subarray(0, 24)), 'a header is damaged');
  const kind = Object.keys(KINDS).find((name) => KINDS[name] === number);
  assert(kind && flags <= (kind === 'WRITE' ? 1 : 0), `kind ${number} with flags ${flags}`);
  assert(nbytes > 8n && nbytes <= maxPayloadNbytes, `a payload of ${nbytes} bytes`);
  const payload = await read(Number(nbytes));
  const size = payload[`readUInt32${end}`]();
  const bodyAt = 4 + size + (4 + size < payload.length ? -(36 + size) & 63 : 0);
  assert(size <= 5 << 20 && bodyAt <= payload.length, `a descriptor of ${size} bytes`);
  const [start, body] = [payload.subarray(0, bodyAt), payload.subarray(bodyAt)];
  assert((checksum & 0xffffffffn) === check(flags ? start : payload), 'a payload is damaged');
  return { kind, order, shapeWord, payload, body, fields: unpack(start.subarray(4, 4 + size)) };
}

const canary = (order) => Buffer.concat([ // as memory of this byte order holds the numbers [5.1]
  Uint16Array.of(0x0102, 0x0304, 0x0506, 0x0708), Uint32Array.of(0x01020304, 0xdeadbeaf),
  BigUint64Array.of(0x0102030405060708n, 0xfedcba9876543210n), Float32Array.of(1, -2.5),
  Float64Array.of(1, -2.5), Uint8Array.of(0xde, 0xad, 0xbe, 0xaf, 0x00, 0x7f, 0x80, 0xff),
].map((numbers) => reorder(bytesOf(numbers), numbers.BYTES_PER_ELEMENT, order)));

/** HELLO and AUTH in both directions [5]; returns the HELLO of the peer. */
async function shakeHands({ send, receive }, secret) {
  const [role, nonce] = ['client', randomBytes(32)];
  const range = { version_min: 1, version_max: 1, max_payload_nbytes: MAX_PAYLOAD_NBYTES };
  const names = { instance_id: 'javascript', facts: {}, carriers: ['tcp'] };
  const hello = await send('HELLO', { role, nonce, ...range, ...names }, canary(HOST_ORDER));
  const { fields: remote, body, order, payload } = await receive();
  assert(body.equals(canary(order)), 'byte_order');
  const sha256 = (bytes) => createHash('sha256').update(bytes).digest();
  const dialler = ['dial', role, nonce, sha256(hello.subarray(32))];
  const accepter = ['accept', remote.role, remote.nonce, sha256(payload)];
  const macOf = (...items) => (!secret ? Buffer.alloc(32) : items.flat().reduce((mac, item) =>
    mac.update(Buffer.of(item.length)).update(item), createHmac('sha256', secret)).digest());
  await send('AUTH', { mac: macOf('kvproto auth v1', dialler, accepter) });
  const { mac } = (await receive()).fields;
  assert(timingSafeEqual(mac, macOf('kvproto auth v1', accepter, dialler)), 'other secrets');
  return remote;
}

/** Connects, shakes hands (`secret`: text or nothing), and returns what `use` returns. */
export async function withConnection(address, secret, use) {
  const [host, port] = address.split(/:(?=\d+$)/);
  const socket = net.connect({ host, port, noDelay: true });
  socket.setTimeout(15000, () => socket.destroy(new Error(`${address} is silent`)));
  const readable = on(socket, 'readable', { close: ['close'] }); // throws the socket's errors
  const read = async (nbytes) => {
    const bytes = socket.read(nbytes);
    if (bytes?.length === nbytes) return bytes;
    assert(!bytes && !(await readable.next()).done, `${address} ended the connection`);
    return read(nbytes);
  };
  const send = (...message) => new Promise((resolve, reject) => { // of the frame, once it is out
    const frame = encodeFrame(...message);
    socket.write(frame, (error) => (error ? reject(socket.errored ?? error) : resolve(frame)));
  });
  const receive = async () => { // the next message that is not PING
    const frame = await readFrame(read, peer.remote ? MAX_PAYLOAD_NBYTES : 1 << 16);
    assert(!['ERROR', 'ABORT'].includes(frame.kind), `${frame.kind}: ${frame.fields.message}`);
    return frame.kind === 'PING' ? send('PONG', frame.fields).then(receive) : frame;
  };
  const peer = { send, receive };
  try {
    peer.remote = await shakeHands(peer, secret);
    return await use(peer);
  } finally {
    socket.end().on('readable', () => socket.read()).setTimeout(1000); // unread bytes cause RST
  }
}
