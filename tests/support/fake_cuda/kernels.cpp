// The kernels of tierstate, compiled for the host: a kernel is called once for each of its threads, one after the other.

#include <cstddef>

struct Index {
  unsigned x;
};

static thread_local Index threadIdx, blockIdx, blockDim;
static thread_local long long to_host; // from an address of the device to the one where its memory really lies

#define __global__
#define __device__ static
#define __constant__ static
#define MEMORY(address) ((address) + to_host)
#define ONE_OF_WARP true

static unsigned long long __umul64hi(unsigned long long one, unsigned long long other) {
  return (unsigned __int128)one * other >> 64;
}

static void atomicAdd(unsigned long long* to, unsigned long long value) {
  *to += value;
}

#include "kernels.cu"

extern "C" void run(void (*kernel)(u64, u64, u64, u64, u64), unsigned blocks, unsigned threads, long long offset, u64* args) {
  to_host = offset, blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
      kernel(args[0], args[1], args[2], args[3], args[4]);
}
