// The PTX layer (src/ptx) on a Hopper GPU, without torch: products, TMA in and out, barriers. One line per check, `ok`
// or the first wrong element; exits 1 if any is wrong.
//
//   nvcc --options-file src/cuda/nvcc_options.txt -o ptx_self_test tests/gpu/ptx_self_test.cu && ./ptx_self_test
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "../../src/ptx/tensor_map.h"
#include "ptx_self_test.cuh"

bool all_right = true;

void must(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("FAIL  %s\n", cudaGetErrorString(status));
  std::exit(1);
}

template <typename T>
struct DeviceArray {
  T* data = nullptr;
  size_t count;
  explicit DeviceArray(const std::vector<T>& from) : count(from.size()) {
    must(cudaMalloc(&data, count * sizeof(T)));
    must(cudaMemcpy(data, from.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data); }
  std::vector<T> read() const {
    std::vector<T> host(count);
    must(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
};

template <typename Kernel, typename... Args>
void run(Kernel kernel, const Args&... args) {
  must(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  kernel<<<1, kThreads, kSharedBytes>>>(args...);
  must(cudaGetLastError());
  must(cudaDeviceSynchronize());
}

// `got`, rows of `columns`, against want(row, column).
template <typename T>
void check(const std::string& name, const std::vector<T>& got, int columns, const std::function<T(int, int)>& want) {
  for (size_t i = 0; i < got.size(); ++i) {
    const int row = int(i) / columns, column = int(i) % columns;
    if (got[i] == want(row, column)) continue;
    std::printf("FAIL  %s: (%d, %d) is %g, not %g\n", name.c_str(), row, column, double(got[i]),
                double(want(row, column)));
    all_right = false;
    return;
  }
  std::printf("ok    %s\n", name.c_str());
}

// Integers from -3 to 3, whose products and sums are exact, and their two encodings.
struct Integers {
  int rows, columns;
  std::vector<int> values;
  Integers(int rows, int columns, uint32_t seed) : rows(rows), columns(columns), values(size_t(rows) * columns) {
    for (int& x : values) x = int((seed = seed * 1664525u + 1013904223u) >> 16) % 7 - 3;
  }
  int at(int row, int column) const { return values[row * columns + column]; }
  std::vector<uint16_t> encode(bool bfloat16) const {
    constexpr uint16_t kBFloat16[4] = {0, 0x3f80, 0x4000, 0x4040}, kFloat16[4] = {0, 0x3c00, 0x4000, 0x4200};
    std::vector<uint16_t> codes;
    for (const int x : values) codes.push_back((bfloat16 ? kBFloat16 : kFloat16)[std::abs(x)] | (x < 0 ? 0x8000 : 0));
    return codes;
  }
};

template <typename Shape>
CUtensorMap make_map(const Shape& shape, bool bfloat16 = true) {
  CUtensorMap map{};
  const auto type = bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (encode_tensor_map(&map, type, shape)) return map;
  std::printf("FAIL  the driver refused a tensor map\n");
  std::exit(1);
}
CUtensorMap matrix_map(const DeviceArray<uint16_t>& data, const Integers& x, int box_rows, bool bfloat16) {
  return make_map(TensorMapShape{data.data, uint64_t(x.columns), uint64_t(x.rows), 1, 1, uint64_t(x.columns) * 2, 16,
                                 16, uint32_t(box_rows)}, bfloat16);
}

template <int kN, bool kBFloat16>
void check_products() {
  const std::string shape = " m64n" + std::to_string(kN) + (kBFloat16 ? " bfloat16" : " float16");
  DeviceArray<float> out(std::vector<float>(kM * kN, -1.f));
  {
    const Integers q(kM, kScoreK, 1), k(kN, kScoreK, 2);
    const DeviceArray<uint16_t> q_data(q.encode(kBFloat16)), k_data(k.encode(kBFloat16));
    run(scores<kN, kBFloat16>, matrix_map(q_data, q, kM, kBFloat16), matrix_map(k_data, k, kN, kBFloat16), out.data);
    check<float>("wgmma ss" + shape, out.read(), kN, [&](int row, int column) {
      int sum = 0;
      for (int i = 0; i < kScoreK; ++i) sum += q.at(row, i) * k.at(column, i);
      return float(sum);
    });
  }
  const Integers p(kM, kOutputK, 3), v(kOutputK, kN, 4);
  const DeviceArray<uint16_t> p_data(p.encode(kBFloat16)), v_data(v.encode(kBFloat16));
  run(outputs<kN, kBFloat16>, static_cast<const uint16_t*>(p_data.data), matrix_map(v_data, v, kOutputK, kBFloat16),
      out.data);
  check<float>("wgmma rs" + shape, out.read(), kN, [&](int row, int column) {
    int sum = int(kBefore);
    for (int i = 0; i < kOutputK; ++i) sum += p.at(row, i) * v.at(i, column);
    return float(sum);
  });
}

template <int kN, bool kBFloat16>
void check_sums() {
  const std::string shape = " m64n" + std::to_string(kN) + (kBFloat16 ? " bfloat16" : " float16");
  DeviceArray<float> out(std::vector<float>(kM * kN, -1.f));
  const Integers a(kOutputK, kM, 5), b(kOutputK, kN, 6), b_rows(kN, kOutputK, 7);
  const DeviceArray<uint16_t> a_data(a.encode(kBFloat16)), b_data(b.encode(kBFloat16)), rows_data(b_rows.encode(kBFloat16));
  const CUtensorMap map_a = matrix_map(a_data, a, kOutputK, kBFloat16);
  run(sums<kN, kBFloat16, 1>, map_a, matrix_map(b_data, b, kOutputK, kBFloat16), out.data);
  check<float>("wgmma ss, A and B MN-major" + shape, out.read(), kN, [&](int row, int column) {
    int sum = int(kBefore);
    for (int i = 0; i < kOutputK; ++i) sum += a.at(i, row) * b.at(i, column);
    return float(sum);
  });
  run(sums<kN, kBFloat16, 0>, map_a, matrix_map(rows_data, b_rows, kN, kBFloat16), out.data);
  check<float>("wgmma ss, A MN-major" + shape, out.read(), kN, [&](int row, int column) {
    int sum = int(kBefore);
    for (int i = 0; i < kOutputK; ++i) sum += a.at(i, row) * b_rows.at(column, i);
    return float(sum);
  });
}

template <int... kWidths>
void check_widths() {
  (check_products<kWidths, true>(), ...);
  (check_products<kWidths, false>(), ...);
  (check_sums<kWidths, true>(), ...);
  (check_sums<kWidths, false>(), ...);
}

void check_transpose() {
  const DeviceArray<uint16_t> out(std::vector<uint16_t>(64 * 64));
  run(transpose, out.data);
  check<uint16_t>("stmatrix transposed", out.read(), 64, [](int row, int column) { return uint16_t(64 * row + column); });
}

template <bool kTransposed>
void check_fragments() {
  const DeviceArray<uint16_t> out(std::vector<uint16_t>(16 * 16));
  run(fragments<kTransposed>, out.data);
  check<uint16_t>(kTransposed ? "ldmatrix transposed" : "ldmatrix", out.read(), 16,
                  [](int row, int column) { return uint16_t(16 * row + column); });
}

void check_additions() {
  std::vector<float> values(4 * kThreads);
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(i + 1);
  const DeviceArray<float> in(values), out(std::vector<float>(values.size(), 100.f));
  run(add_floats, static_cast<const float*>(in.data), out.data);
  check<float>("additions of floats, bulk and ordinary", out.read(), 1, [](int i, int) { return 101.f + 3 * float(i + 1); });
}

// (batch 2, heads 3, rows 100, columns 72), rows 80 elements apart: boxes of 64 end outside in both directions.
constexpr int kHeads = 3, kRows = 100, kColumns = 72, kStride = 80, kHeadSize = kRows * kStride;
TensorMapShape ragged(const DeviceArray<uint16_t>& data) {
  return {data.data, kColumns, kRows, kHeads, 2, kStride * 2, kHeadSize * 2, kHeads * kHeadSize * 2, 64};
}

void check_edges() {
  std::vector<uint16_t> values(2 * kHeads * kHeadSize);
  for (size_t i = 0; i < values.size(); ++i) values[i] = uint16_t(i + 1);  // 48000 different ones, none zero
  const DeviceArray<uint16_t> data(values), out(std::vector<uint16_t>(64 * 64));
  for (const BoxOrigin at : {BoxOrigin{0, 0, 0, 0}, BoxOrigin{64, 64, 2, 1}, BoxOrigin{0, 64, 1, 0},
                             BoxOrigin{64, 0, 0, 1}, BoxOrigin{0, 128, 0, 0}, BoxOrigin{128, 0, 1, 1}}) {
    run(load_box<BoxOrigin>, make_map(ragged(data)), at, out.data);
    const std::string name = "tma load at row " + std::to_string(at.row) + ", column " + std::to_string(at.column);
    check<uint16_t>(name, out.read(), 64, [&](int row, int column) -> uint16_t {
      const int r = at.row + row, c = at.column + column;
      return r < kRows && c < kColumns ? values[(at.batch * kHeads + at.head) * kHeadSize + r * kStride + c] : 0;
    });
  }
}

void check_store() {
  constexpr uint16_t kUntouched = 0x7777;
  const DeviceArray<uint16_t> data(std::vector<uint16_t>(2 * kHeads * kHeadSize, kUntouched));
  const BoxOrigin at{0, 64, 1, 1};
  run(store_tile<BoxOrigin>, make_map(ragged(data)), at);
  check<uint16_t>("stmatrix and tma store past the edge", data.read(), kStride, [&](int i, int c) -> uint16_t {
    const int head = i / kRows, row = i % kRows - at.row;
    return head == at.batch * kHeads + at.head && row >= 0 && c < kColumns ? row * 128 + c : kUntouched;
  });
}

// Row r of a packed box: head r % kPack of those from at.head_in_group on, row r / kPack of those from at.row on.
constexpr int kPack = 2;
PackedMapShape packed(const DeviceArray<uint16_t>& data) {
  PackedMapShape shape{ragged(data), kHeads, kPack};
  shape.tensor.box_rows = 64 / kPack;
  return shape;
}

void check_packed_edges() {
  std::vector<uint16_t> values(2 * kHeads * kHeadSize);
  for (size_t i = 0; i < values.size(); ++i) values[i] = uint16_t(i + 1);
  const DeviceArray<uint16_t> data(values), out(std::vector<uint16_t>(64 * 64));
  for (const PackedBoxOrigin at : {PackedBoxOrigin{0, 0, 0, 0, 0}, PackedBoxOrigin{64, 2, 80, 0, 1}}) {
    run(load_box<PackedBoxOrigin>, make_map(packed(data)), at, out.data);
    const std::string row = std::to_string(at.row), head = std::to_string(at.head_in_group);
    check<uint16_t>("packed tma load at " + row + ", " + head, out.read(), 64, [&](int row, int column) -> uint16_t {
      const int h = at.head_in_group + row % kPack, r = at.row + row / kPack, c = at.column + column;
      const bool inside = h < kHeads && r < kRows && c < kColumns;
      return inside ? values[(at.batch * kHeads + h) * kHeadSize + r * kStride + c] : 0;
    });
  }
}

void check_packed_store() {
  constexpr uint16_t kUntouched = 0x7777;
  const DeviceArray<uint16_t> data(std::vector<uint16_t>(2 * kHeads * kHeadSize, kUntouched));
  const PackedBoxOrigin at{0, 2, 80, 0, 1};
  run(store_tile<PackedBoxOrigin>, make_map(packed(data)), at);
  check<uint16_t>("packed tma store past the edges", data.read(), kStride, [&](int i, int c) -> uint16_t {
    const int head = i / kRows, row = i % kRows - at.row;
    const bool written = head == at.batch * kHeads + at.head_in_group && row >= 0 && c < kColumns;
    return written ? row * kPack * 128 + c : kUntouched;
  });
}

void check_copies() {
  std::vector<uint16_t> values(2 * kPairs);
  for (size_t i = 0; i < values.size(); ++i) values[i] = uint16_t(i + 1);
  const DeviceArray<uint16_t> data(values), out(std::vector<uint16_t>(values.size()));
  run(copy_pairs, static_cast<const uint16_t*>(data.data), out.data);
  check<uint16_t>("asynchronous copies of 0, 2 and 4 bytes", out.read(), 2,
                  [&](int i, int e) -> uint16_t { return e < i % 3 ? values[2 * i + e] : 0; });
}

// Small numbers, whose sums are exact; the last bits of every float are noise that TF32 does not look at.
void check_tf32() {
  const auto noisy = [](int number) {
    float x = float(number);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits |= 0x1fff;
    std::memcpy(&x, &bits, 4);
    return x;
  };
  const auto of_a = [](int i, int k) { return 1 + (3 * i + 5 * k) % 11; };
  const auto of_b = [](int k, int j) { return 1 + (7 * k + 2 * j) % 13; };
  std::vector<float> a(16 * 8), b(8 * 8), c(16 * 8);
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 8; ++k) a[i * 8 + k] = noisy(of_a(i, k)), c[i * 8 + k] = float(1000 * i + k);
  }
  for (int k = 0; k < 8; ++k) {
    for (int j = 0; j < 8; ++j) b[k * 8 + j] = noisy(of_b(k, j));
  }
  const DeviceArray<float> from_a(a), from_b(b), from_c(c), out(std::vector<float>(kThreads / 32 * 128));
  run(multiply_tf32, static_cast<const float*>(from_a.data), static_cast<const float*>(from_b.data),
      static_cast<const float*>(from_c.data), out.data);
  check<float>("mma tf32", out.read(), 8, [&](int row, int j) {
    const int i = row % 16;
    int sum = 1000 * i + j;
    for (int k = 0; k < 8; ++k) sum += of_a(i, k) * of_b(k, j);
    return float(sum);
  });
}

void check_ring() {
  std::vector<uint16_t> values(kRounds * 64 * 64);
  for (size_t i = 0; i < values.size(); ++i) values[i] = uint16_t(i + 1);
  const DeviceArray<uint16_t> data(values), out(std::vector<uint16_t>(values.size()));
  run(ring, make_map(TensorMapShape{data.data, 64, kRounds * 64, 1, 1, kRowBytes, 16, 16, 64}), out.data);
  check<uint16_t>("mbarrier ring over nine rounds", out.read(), 64, [&](int r, int c) { return values[r * 64 + c]; });
}

int main() {
  check_edges();
  check_store();
  check_packed_edges();
  check_packed_store();
  check_copies();
  check_ring();
  check_tf32();
  check_transpose();
  check_fragments<false>();
  check_fragments<true>();
  check_additions();
  check_widths<32, 40, 64, 80, 96, 112, 128, 192, 256>();
  return all_right ? 0 : 1;
}
