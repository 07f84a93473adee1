// The kernels of ptx_self_test.cu: one block of one warpgroup each, every byte of shared memory NaN at the start.
#pragma once

#include "../../src/ptx/copy_async.cuh"
#include "../../src/ptx/global.cuh"
#include "../../src/ptx/mbarrier.cuh"
#include "../../src/ptx/mma.cuh"
#include "../../src/ptx/tma.cuh"
#include "../../src/ptx/warpgroup.cuh"
#include "../../src/ptx/wgmma.cuh"

using namespace flashsdpa::ptx;

constexpr int kRowBytes = 128;  // of a box: 64 columns of 2 bytes
constexpr int kSharedBytes = 100 * 1024;
constexpr int kM = 64, kThreads = kWarpgroupThreads;
constexpr int kReaders = 3;  // warps that read a slot of the ring

// --- what the checks share -------------------------------------------------------------------------------------------

// Where element (row, column) of a tile of boxes of `rows` rows lies, with the 128-byte swizzle.
__device__ uint32_t swizzled(int rows, int row, int column) {
  const int chunk = column % 64 / 8;
  return column / 64 * rows * kRowBytes + row * kRowBytes + (chunk ^ (row % 8)) * 16 + column % 8 * 2;
}

__device__ uint16_t load_shared_2(uint32_t shared) { return uint16_t(load_shared_4(shared & ~3u) >> (shared & 2) * 8); }

// Fills all memory with NaN, then makes barriers in its first bytes: `full` of one arrival, after them `empty` of
// kReaders arrivals. Returns where tiles may start.
__device__ uint32_t prepare(int full, int empty = 0) {
  extern __shared__ uint8_t memory[];
  const uint32_t start = shared_address(memory), end = start + kSharedBytes;
  for (uint32_t at = start + 4 * threadIdx.x; at < end; at += 4 * blockDim.x) store_shared_4(at, 0xffffffffu);
  fence_proxy_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < full + empty; ++i) mbarrier_init(start + 8 * i, i < full ? 1 : kReaders);
    mbarrier_init_fence();
  }
  __syncthreads();
  return (start + 8 * (full + empty) + 1023) & ~1023u;
}
__device__ uint32_t barrier_at(int i) {
  extern __shared__ uint8_t memory[];
  return shared_address(memory) + 8 * i;
}

__device__ void load_boxes(uint32_t shared, const CUtensorMap* map, int boxes, int rows, uint32_t barrier) {
  for (int box = 0; box < boxes; ++box) {
    tma_load(shared + box * rows * kRowBytes, map, BoxOrigin{64 * box, 0, 0, 0}, barrier,
             cache_policy<Reuse::kNone>());
  }
}

template <int kCount>
__device__ void write_accumulators(const float (&d)[kCount], float* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    out[row * (2 * kCount) + column] = d[i];
  }
}

// --- the checks ------------------------------------------------------------------------------------------------------

constexpr int kScoreK = 128, kScoreBoxes = kScoreK / 64;
constexpr int kOutputK = 96;  // six steps of 16, as with 96 keys
constexpr float kBefore = 5.f;  // in the accumulators

// S (64 x N) = Q (64 x 128) K (N x 128)^T: both K-major in shared memory; two boxes, eight steps.
template <int kN, bool kBFloat16>
__global__ void __launch_bounds__(kThreads)
    scores(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, float* out) {
  const uint32_t q = prepare(1), k = q + kScoreBoxes * kM * kRowBytes, barrier = barrier_at(0);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(barrier, kScoreBoxes * (kM + kN) * kRowBytes);
    load_boxes(q, &map_q, kScoreBoxes, kM, barrier);
    load_boxes(k, &map_k, kScoreBoxes, kN, barrier);
  }
  __syncwarp();
  mbarrier_wait(barrier, 0);
  __syncwarp();
  float d[kN / 2];
#pragma unroll
  for (float& x : d) x = __int_as_float(0x7fffffff);  // NaN: the first step must not read it
  const uint64_t a = wgmma_operand(q), b = wgmma_operand(k);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kScoreK / 16; ++step) {
    const int box = step / 4, within = step % 4 * 32;
    Wgmma<kN>::template ss<kBFloat16, 0>(d, wgmma_advance(a, box * kM * kRowBytes + within),
                                         wgmma_advance(b, box * kN * kRowBytes + within), step > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_settle(d);
  write_accumulators(d, out);
}

// O (64 x N) = 5 + P (64 x 96) V (96 x N): P in registers, V MN-major in shared memory; up to four boxes, six steps.
template <int kN, bool kBFloat16>
__global__ void __launch_bounds__(kThreads)
    outputs(const uint16_t* p, const __grid_constant__ CUtensorMap map_v, float* out) {
  constexpr int kBoxes = (kN + 63) / 64, kBoxBytes = kOutputK * kRowBytes;
  const uint32_t v = prepare(1), barrier = barrier_at(0);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(barrier, kBoxes * kBoxBytes);
    load_boxes(v, &map_v, kBoxes, kOutputK, barrier);
  }
  __syncwarp();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  uint32_t a[kOutputK / 16][4];  // as an accumulator of 64 x 96, packed in pairs
#pragma unroll
  for (int i = 0; i < kOutputK / 4; ++i) {
    const int r = row + i % 2 * 8, column = i / 2 * 8 + lane % 4 * 2;
    a[i / 4][i % 4] = *reinterpret_cast<const uint32_t*>(p + r * kOutputK + column);
  }
  mbarrier_wait(barrier, 0);
  __syncwarp();
  float d[kN / 2];
#pragma unroll
  for (float& x : d) x = kBefore;
  const uint64_t b = wgmma_operand(v, kBoxBytes);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kOutputK / 16; ++step) {
    Wgmma<kN>::template rs<kBFloat16, 1>(d, a[step], wgmma_advance(b, step * 16 * kRowBytes), 1);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_settle(d);
  write_accumulators(d, out);
}

// 5 + A^T (64 x 96) B (96 x N): A MN-major in shared memory, and B too, or (kTransB 0) K-major, given as (N, 96).
template <int kN, bool kBFloat16, int kTransB>
__global__ void __launch_bounds__(kThreads)
    sums(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, float* out) {
  constexpr int kRowsB = kTransB ? kOutputK : kN, kBoxesB = ((kTransB ? kN : kOutputK) + 63) / 64;
  const uint32_t a_tile = prepare(1), b_tile = a_tile + kOutputK * kRowBytes, barrier = barrier_at(0);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(barrier, (kOutputK + kBoxesB * kRowsB) * kRowBytes);
    load_boxes(a_tile, &map_a, 1, kOutputK, barrier);
    load_boxes(b_tile, &map_b, kBoxesB, kRowsB, barrier);
  }
  __syncwarp();
  mbarrier_wait(barrier, 0);
  __syncwarp();
  float d[kN / 2];
#pragma unroll
  for (float& x : d) x = kBefore;
  const uint64_t a = wgmma_operand(a_tile), b = wgmma_operand(b_tile, kRowsB * kRowBytes);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kOutputK / 16; ++step) {
    const int further = kTransB ? step * 16 * kRowBytes : step / 4 * kRowsB * kRowBytes + step % 4 * 32;
    Wgmma<kN>::template ss<kBFloat16, kTransB, 1>(d, wgmma_advance(a, step * 16 * kRowBytes), wgmma_advance(b, further), 1);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_settle(d);
  write_accumulators(d, out);
}

// A tile of 16 x 16 of 16-bit elements through shared memory: element (r, c), 16 r + c, read by ldmatrix as that of row r, or of
// column r.
template <bool kTransposed>
__global__ void __launch_bounds__(kThreads) fragments(uint16_t* out) {
  const uint32_t tile = prepare(0);
  if (threadIdx.x >= kWarpLanes) return;
  const int lane = threadIdx.x;
  for (int i = lane; i < 128; i += kWarpLanes) store_shared_4(tile + 4 * i, uint32_t(2 * i | (2 * i + 1) << 16));
  __syncwarp();
  uint32_t r[4];
  ldmatrix_x4<kTransposed>(tile + lane % 16 * 32 + lane / 16 * 16, r);  // rows 0 to 7, 8 to 15, then the other half of each
  for (int t = 0; t < 4; ++t) {
    const int across = lane / 4, along = lane % 4 * 2, row = t % 2 * 8, column = t / 2 * 8;
    for (int half = 0; half < 2; ++half) {
      const int down = row + (kTransposed ? along + half : across), right = column + (kTransposed ? across : along + half);
      out[16 * down + right] = uint16_t(r[t] >> 16 * half);
    }
  }
}

// A box of 64 x 64 whose element (r, c) is 64 r + c, put together by stmatrix from its transpose.
__global__ void __launch_bounds__(kThreads) transpose(uint16_t* out) {
  const uint32_t tile = prepare(0);
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;  // rows of the fragment, columns of the tile
  for (int j = 0; j < 4; ++j) {
    uint32_t r[4];
    for (int t = 0; t < 4; ++t) {
      const uint32_t low = (16 * j + t / 2 * 8 + lane % 4 * 2) * 64 + first + lane / 4 + t % 2 * 8;
      r[t] = low | (low + 64) << 16;
    }
    const int row = 16 * j + lane / 16 * 8 + lane % 8, column = first + lane / 8 % 2 * 8;
    stmatrix_x4_transposed(tile + swizzled(64, row, column), r[0], r[1], r[2], r[3]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * 64; i += kThreads) out[i] = load_shared_2(tile + swizzled(64, i / 64, i % 64));
}

// The product of one warp: a is 16 x 8, b 8 x 8, c and out 16 x 8, by rows; every warp makes the same.
__global__ void __launch_bounds__(kThreads) multiply_tf32(const float* a, const float* b, const float* c, float* out) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4;
  const auto of_a = [&](int i) { return __float_as_uint(a[(row + i % 2 * 8) * 8 + column + i / 2 * 4]); };
  const auto of_b = [&](int i) { return __float_as_uint(b[(column + i * 4) * 8 + row]); };
  const uint32_t four[4] = {of_a(0), of_a(1), of_a(2), of_a(3)};
  float d[4], from[4];
  for (int i = 0; i < 4; ++i) from[i] = c[(row + i / 2 * 8) * 8 + 2 * column + i % 2];
  mma_tf32(d, four, of_b(0), of_b(1), from);
  for (int i = 0; i < 4; ++i) out[threadIdx.x / 32 * 128 + (row + i / 2 * 8) * 8 + 2 * column + i % 2] = d[i];
}

// out += 2 * in + in + 1 of 512 floats: two bulk additions, one made of the bulk-loaded values, and ordinary ones.
__global__ void __launch_bounds__(kThreads) add_floats(const float* in, float* out) {
  const uint32_t tile = prepare(1), barrier = barrier_at(0);
  const uint32_t bytes = 4 * 4 * kThreads;
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(barrier, bytes);
    bulk_load(tile, in, bytes, barrier);
  }
  mbarrier_wait(barrier, 0);
  const uint32_t mine = tile + 16 * threadIdx.x;
  float x, y, z, w;
  load_shared_floats(mine, x, y);
  z = load_shared_float(mine + 8);
  w = load_shared_float(mine + 12);
  store_shared_floats(mine + bytes, 2 * x, 2 * y, 2 * z, 2 * w);
  fence_proxy_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_reduce_add(out, tile, bytes);
    bulk_reduce_add(out, tile + bytes, bytes);
    tma_store_commit();
    tma_store_wait();
  }
  reduce_add_floats(out + 4 * threadIdx.x, 1, 1, 1, 1);
}

// The box of 64 x 64 at `at`, as it arrives.
// The box of 64 x 64 at `at`, as it arrives. Origin: of a plain or of a packed map.
template <typename Origin>
__global__ void __launch_bounds__(kThreads)
    load_box(const __grid_constant__ CUtensorMap map, Origin at, uint16_t* out) {
  const uint32_t tile = prepare(1), barrier = barrier_at(0);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(barrier, 64 * kRowBytes);
    tma_load(tile, &map, at, barrier, cache_policy<Reuse::kSoon>());
  }
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < 64 * 64; i += kThreads) out[i] = load_shared_2(tile + swizzled(64, i / 64, i % 64));
}

// Pair i of elements: 2 * (i % 3) bytes of it copied asynchronously, the rest zero.
constexpr int kPairs = 64 * 32;
__global__ void __launch_bounds__(kThreads) copy_pairs(const uint16_t* from, uint16_t* out) {
  const uint32_t tile = prepare(0);
  for (int i = threadIdx.x; i < kPairs; i += kThreads) copy_async<4>(tile + 4 * i, from + 2 * i, 2 * (i % 3));
  copy_async_wait();
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * kPairs; i += kThreads) out[i] = load_shared_2(tile + 2 * i);
}

// A tile of 64 x 128 whose element (r, c) is 128 r + c, put together by stmatrix, stored as two boxes.
template <typename Origin>
__global__ void __launch_bounds__(kThreads) store_tile(const __grid_constant__ CUtensorMap map, Origin at) {
  const uint32_t tile = prepare(0);
  const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16;
  for (int j = 0; j < 8; ++j) {  // 16 columns at a time
    uint32_t r[4];
    for (int t = 0; t < 4; ++t) {
      const uint32_t low = (first_row + lane / 4 + t % 2 * 8) * 128 + 16 * j + t / 2 * 8 + lane % 4 * 2;
      r[t] = low | (low + 1) << 16;
    }
    stmatrix_x4(tile + swizzled(64, first_row + lane % 16, 16 * j + lane / 16 * 8), r[0], r[1], r[2], r[3]);
  }
  fence_proxy_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int box = 0; box < 2; ++box) {
      tma_store(&map, tile + box * 64 * kRowBytes, at);
      at.column += 64;
    }
    tma_store_commit();
    tma_store_wait_read();
  }
}

// Boxes of 64 x 64 through a ring of two slots: warp 0 loads, three warps copy them out, at different speeds.
constexpr int kRounds = 9, kSlots = 2;
__global__ void __launch_bounds__(kThreads) ring(const __grid_constant__ CUtensorMap map, uint16_t* out) {
  const uint32_t tiles = prepare(kSlots, kSlots);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int round = 0; round < kRounds; ++round) {
      const int slot = round % kSlots;
      mbarrier_wait(barrier_at(kSlots + slot), (round / kSlots % 2) ^ 1);
      mbarrier_arrive_expect(barrier_at(slot), 64 * kRowBytes);
      tma_load(tiles + slot * 64 * kRowBytes, &map, BoxOrigin{0, 64 * round, 0, 0}, barrier_at(slot),
               cache_policy<Reuse::kNone>());
    }
  } else if (warp > 0) {
    for (int round = 0; round < kRounds; ++round) {
      const int slot = round % kSlots;
      mbarrier_wait(barrier_at(slot), round / kSlots % 2);
      __nanosleep(1000 * ((round + warp) % 4));
      for (int i = threadIdx.x - 32; i < 64 * 64; i += 32 * kReaders) {
        out[round * 64 * 64 + i] = load_shared_2(tiles + slot * 64 * kRowBytes + swizzled(64, i / 64, i % 64));
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barrier_at(kSlots + slot));
    }
  }
}
