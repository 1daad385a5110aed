// XXH3 with 64 bits and seed 0, the checksum of docs/wire.md; Node has none of its own. For more
// than 8 bytes: nothing shorter is checked. Source: xxhash_spec.md of the xxHash project.
const SECRET = new DataView(Uint8Array.from(Buffer.from(
  'uP5sOSOkS758AYEs9yGtHN7UbemDkJfbckCkpLezZx/LeeZOzMDleIJa0H3M/3IhuAhGdPdDJI7gNZDmgTomTDwoUruRww' +
  'DLiNBlixtTLqNxZEiXog35TjgZ70ap3qzYqPp2P+OcND/53LvHxwtPHYpR4EvNtFkxyJ9+ydl4c2TqxayDNNPrw8WBoP/6' +
  'E2PrFw3dUbfw2knTFlUmKdRonisWvlh9R6H8j/i40XrQMc5FyzqPlRYEKK/X+8q7S0B+', 'base64')).buffer);
const [P32_1, P64_1] = [0x9e3779b1n, 0x9e3779b185ebca87n];
const u64 = (x) => BigInt.asUintN(64, x); // with it V8 keeps a BigInt in a register
const key = (at) => SECRET.getBigUint64(at, true);
const fold = (a, b) => u64(a * b) ^ ((a * b) >> 64n);
const shift = (x, bits) => x ^ (x >> bits);
const finish = (x) => shift(u64(shift(u64(x), 37n) * 0x165667919e3779f9n), 32n);

/** XXH3-64 of a Buffer, as a BigInt. Each range of lengths has a formula of its own. */
export function xxh3(bytes) {
  const [size, view] = [bytes.length, new DataView(bytes.buffer, bytes.byteOffset, bytes.length)];
  if (size > 240) return xxh3Long(view, size);
  const word = (at) => view.getBigUint64(at, true);
  const pair = (at, k) => fold(word(at) ^ key(k), word(at + 8) ^ key(k + 8));
  let sum = BigInt(size) * P64_1;
  if (size > 128) {
    for (let i = 0; i < 128; i += 16) sum += pair(i, i);
    sum = finish(sum);
    for (let i = 128; i + 16 <= size; i += 16) sum += pair(i, i - 125);
    return finish(sum + pair(size - 16, 119));
  }
  if (size > 16) {
    for (let i = 0; 2 * i < size; i += 16) sum += pair(i, 2 * i) + pair(size - i - 16, 2 * i + 16);
    return finish(sum);
  }
  const [low, high] = [word(0) ^ key(24) ^ key(32), word(size - 8) ^ key(40) ^ key(48)];
  const swapped = view.getBigUint64(0) ^ SECRET.getBigUint64(24) ^ SECRET.getBigUint64(32);
  return finish(BigInt(size) + swapped + high + fold(low, high));
}

/** More than 240 bytes: stripes of 64 bytes into 8 lanes, which are mixed after every 1024. */
function xxh3Long(view, size) {
  const lanes = BigUint64Array.of(0xc2b2ae3dn, P64_1, 0xc2b2ae3d27d4eb4fn, 0x165667b19e3779f9n,
    0x85ebca77c2b2ae63n, 0x85ebca77n, 0x27d4eb2f165667c5n, P32_1);
  const last = (size - 1) >> 6;
  for (let stripe = 0; stripe <= last; stripe++) {
    const [at, k] = stripe < last ? [64 * stripe, 8 * (stripe % 16)] : [size - 64, 121];
    for (let i = 0; i < 8; i++) {
      const data = view.getBigUint64(at + 8 * i, true);
      const keyed = data ^ key(k + 8 * i);
      lanes[i ^ 1] += data;
      lanes[i] += u64((keyed & 0xffffffffn) * (keyed >> 32n));
    }
    if (stripe === last || stripe % 16 < 15) continue;
    for (let i = 0; i < 8; i++) lanes[i] = (shift(lanes[i], 47n) ^ key(128 + 8 * i)) * P32_1;
  }
  const pair = (i) => fold(lanes[i] ^ key(11 + 8 * i), lanes[i + 1] ^ key(19 + 8 * i));
  return finish(BigInt(size) * P64_1 + pair(0) + pair(2) + pair(4) + pair(6));
}
