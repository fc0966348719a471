// Kernels for what is computed where the state lies: digests of chunks (xxh3-128), and sums of blocks.
//
// Compiled by NVRTC when they are first used (kernels.py). Threads have nothing to do with each other, except that those
// of a warp add up what they have: so tests compile the same source for the host, where a thread does that part of others
// too, and call a kernel once for each thread.
//
// The hash is XXH3_128bits of https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md with its default secret,
// for inputs of more than 240 bytes. Its eight accumulators meet only at the end, so each has threads of its own; and
// what 16 stripes (1 KiB) add to one is a sum, so that several threads can make it.

#ifdef __CUDACC_RTC__
#define MEMORY(address) (address)
#define ONE_OF_WARP (threadIdx.x % 32 == 0)
#define GROUPS 4 // threads of a lane
#else
#define GROUPS 1
#endif

typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull

#define LANES 8       // accumulators
#define STRIPE 64     // bytes: one word for each lane
#define STRIPES 16    // of a block, between two scrambles
#define BLOCK 1024    // bytes
#define SECRET 192    // bytes
#define AHEAD 8       // blocks whose words are on their way

// The default secret: its bytes, as little-endian words.
__constant__ const u64 SECRET_WORDS[SECRET / 8] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

// A word of the secret at any byte.
__device__ u64 secret_at(u32 byte) {
  u32 shift = byte % 8 * 8;
  u64 low = SECRET_WORDS[byte / 8];
  return shift ? low >> shift | SECRET_WORDS[byte / 8 + 1] << (64 - shift) : low;
}

struct Pair {
  u64 even, odd;
};

// Two neighbouring words of a stripe: a thread needs its own, and the one whose lane adds it plainly.
__device__ Pair pair_at(const unsigned char *memory) {
#ifdef __CUDACC_RTC__
  ulonglong2 found = *(const ulonglong2 *)memory;
  Pair pair = {found.x, found.y};
#else
  Pair pair = *(const Pair *)memory;
#endif
  return pair;
}

// What a lane adds for one stripe.
__device__ u64 added(Pair words, u32 lane, u64 key) {
  u64 own = lane % 2 ? words.odd : words.even, other = lane % 2 ? words.even : words.odd;
  u64 keyed = own ^ key;
  return other + (keyed & 0xFFFFFFFFull) * (keyed >> 32);
}

// What one of the groups of threads adds for a block, and then what all of them add.
__device__ u64 added_by_group(const Pair *words, u32 lane, const u64 *keys) {
  u64 sum = 0;
#pragma unroll
  for (u32 i = 0; i < STRIPES / GROUPS; i++) sum += added(words[i], lane, keys[i]);
  return sum;
}

__device__ u64 of_groups(u64 sum) {
#ifdef __CUDACC_RTC__
  for (u32 step = LANES; step < LANES * GROUPS; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
#endif
  return sum;
}

__device__ void load_block(Pair *words, const unsigned char *memory) {
#pragma unroll
  for (u32 i = 0; i < STRIPES / GROUPS; i++) words[i] = pair_at(memory + i * STRIPE);
}

// The accumulators of each chunk: lanes[8 * chunk + lane]. A warp digests one chunk: each lane has four threads, which
// share the 16 stripes of a block, and have the words of the next blocks on their way.
//
// Addresses and lengths are multiples of 16; lengths are more than 240.
extern "C" __global__ void xxh3_lanes(u64 chunks, const u64 *address, const u64 *nbytes, u64 *lanes) {
  u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, chunk = thread / (LANES * GROUPS);
  u32 lane = thread % LANES, group = thread / LANES % GROUPS;
  if (chunk >= chunks) return;
  const u64 begin[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
  const unsigned char *memory = (const unsigned char *)MEMORY(address[chunk]) + lane / 2 * 16;
  const unsigned char *mine = memory + group * (STRIPES / GROUPS) * STRIPE;
  u64 length = nbytes[chunk], whole = (length - 1) / BLOCK, sum = begin[lane];
  u64 keys[STRIPES / GROUPS], scramble = SECRET_WORDS[(SECRET - STRIPE) / 8 + lane];
  Pair words[AHEAD][STRIPES / GROUPS];
#pragma unroll
  for (u32 i = 0; i < STRIPES / GROUPS; i++) keys[i] = SECRET_WORDS[group * (STRIPES / GROUPS) + i + lane];
#pragma unroll
  for (u32 ahead = 0; ahead < AHEAD; ahead++)
    if (ahead < whole) load_block(words[ahead], mine + ahead * BLOCK);
  for (u64 first = 0; first < whole; first += AHEAD) {
#pragma unroll
    for (u32 ahead = 0; ahead < AHEAD; ahead++) {
      u64 block = first + ahead;
      if (block >= whole) break;
      u64 more = added_by_group(words[ahead], lane, keys);
      if (block + AHEAD < whole) load_block(words[ahead], mine + (block + AHEAD) * BLOCK);
      sum += of_groups(more);
      sum = (sum ^ sum >> 47 ^ scramble) * PRIME32_1;
    }
  }
  const unsigned char *last = memory + whole * BLOCK;
  u32 rest = (u32)((length - 1 - whole * BLOCK) / STRIPE);
  for (u32 i = 0; i < rest; i++) sum += added(pair_at(last + i * STRIPE), lane, SECRET_WORDS[i + lane]);
  sum += added(pair_at(memory + length - STRIPE), lane, secret_at(SECRET - STRIPE - 7 + lane * 8));
  lanes[LANES * chunk + lane] = sum;
}

__device__ u64 folded(u64 one, u64 other) { return one * other ^ __umul64hi(one, other); }

__device__ u64 merged(const u64 *sums, u32 secret, u64 start) {
  u64 found = start;
  for (u32 i = 0; i < LANES; i += 2)
    found += folded(sums[i] ^ secret_at(secret + i * 8), sums[i + 1] ^ secret_at(secret + i * 8 + 8));
  found = (found ^ found >> 37) * 0x165667919E3779F9ull;
  return found ^ found >> 32;
}

__device__ u64 reversed(u64 word) {
  u64 found = 0;
  for (u32 i = 0; i < 8; i++) found = found << 8 | (word >> i * 8 & 0xFF);
  return found;
}

// The digest of each chunk, 16 bytes in their canonical (big-endian) order, from its accumulators.
//
// `digests` may be pinned memory of the host: a copy would wait for other copies, or they for it.
extern "C" __global__ void xxh3_merge(u64 chunks, const u64 *nbytes, const u64 *lanes, u64 *digests) {
  u64 chunk = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (chunk >= chunks) return;
  const u64 *sums = lanes + chunk * LANES;
  u64 length = nbytes[chunk];
  digests[2 * chunk] = reversed(merged(sums, SECRET - STRIPE - 11, ~(length * PRIME64_2)));
  digests[2 * chunk + 1] = reversed(merged(sums, 11, length * PRIME64_1));
}

#define SIDE 128              // of the square of 32-bit words that is summed together
#define SUM_THREADS 256       // that sum one square, each with 16 loads of 4 words

__device__ u64 of_warp(u64 sum) {
#ifdef __CUDACC_RTC__
  for (int step = 16; step; step /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, step);
#endif
  return sum;
}

// The two sums of each square, as block_sums.py says: of its words, and of each word times its place. `sums` begins as
// zeros; additions may be in any order, as they are modulo 2^64.
extern "C" __global__ void block_sums(u64 blocks, const int *memory, u64 *sums) {
  const int *square = memory + (u64)blockIdx.x * SIDE * SIDE;
  u64 plain = 0, weighted = 0;
#pragma unroll
  for (u32 i = 0; i < SIDE * SIDE / SUM_THREADS / 4; i++) {
    u32 place = (i * SUM_THREADS + threadIdx.x) * 4;
    int words[4];
#ifdef __CUDACC_RTC__
    int4 found = *(const int4 *)(square + place);
    words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
#else
    for (u32 j = 0; j < 4; j++) words[j] = square[place + j];
#endif
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      plain += (u64)(i64)words[j];
      weighted += (u64)(i64)words[j] * (place + j);
    }
  }
  plain = of_warp(plain), weighted = of_warp(weighted);
  if (!ONE_OF_WARP) return;
  atomicAdd(sums + 2 * (u64)blockIdx.x, plain);
  atomicAdd(sums + 2 * (u64)blockIdx.x + 1, weighted);
}
