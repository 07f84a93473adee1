// Emulated src/ptx/wgmma_shapes.cuh: any width.
#pragma once

#include "../../emulation/device.h"
#include "../../emulation/tensor_cores.h"

namespace flashsdpa::ptx {

template <int kN>
struct Wgmma {
  template <bool kBFloat16, int kTransB, int kTransA = 0>
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    emulation::Product product;
    product.bfloat16 = kBFloat16;
    product.a = a;
    product.b = b;
    product.transposed_a = kTransA;
    product.transposed_b = kTransB;
    product.accumulate = accumulate;
    emulation::issue_product(kN, d, nullptr, product);
  }
  template <bool kBFloat16, int kTransB>
  static void rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    emulation::Product product;
    product.bfloat16 = kBFloat16;
    product.b = b;
    product.transposed_b = kTransB;
    product.accumulate = accumulate;
    emulation::issue_product(kN, d, a, product);
  }
};

}  // namespace flashsdpa::ptx
