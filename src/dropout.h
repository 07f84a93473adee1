// Which scores dropout keeps: a function of (seed, offset, batch, query head, query, key) alone. Forward and backward, tiles,
// splits, threads and instruction sets so drop the same ones, and nothing is stored. No torch, no CUDA here.
//
// Random bits are Philox4x32-7's (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): seven is
// the least number of rounds with which it passes BigCrush there, and they are most of what dropout costs.
// Each (batch, query head) has a stream of its own, the four words (s0, s1, s2, s3) of Philox(key: seed; counter: offset,
// offset >> 32, batch, head). A call Philox(key: s0, s1; counter: block of keys, block of queries, s2, s3) then decides
// eight scores, with 16 bits for each: a score is kept where its bits are below Dropout::kept.
//
//   queries q, q + 8 (bit 3 of q is 0)  x  keys k, k + 1, k + 8, k + 9 (bits 0 and 3 of k are 0):
//   word 0: key k, word 1: key k + 1, word 2: key k + 8, word 3: key k + 9; low half: query q, high half: query q + 8
//
// In a wgmma accumulator whose rows are queries a thread holds just these eight, of two neighbouring groups of 8 columns;
// where rows are keys it holds four of them, and lanes 4 apart can share two calls. In S^T (keys x queries) calls of eight
// consecutive q are the lanes of vectors: each word gives one key's 8 or 16 neighbouring queries.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flashsdpa {

constexpr uint32_t kDropoutOne = 1 << 16;  // the probability 1: p is honoured in steps of 2^-16

// How many of the 2^16 values of a score's bits keep it.
constexpr uint32_t dropout_kept(double p) { return kDropoutOne - uint32_t(p * kDropoutOne + 0.5); }

// The index, in a counter, of the block that has a query or key.
FLASHSDPA_DEVICE constexpr uint32_t dropout_query_block(int64_t query) { return uint32_t(query >> 4 << 3 | (query & 7)); }
FLASHSDPA_DEVICE constexpr uint32_t dropout_key_block(int64_t key) { return uint32_t(key >> 4 << 2 | (key >> 1 & 3)); }

// Philox4x32 of a counter c, in place. W holds 64 bits, or lanes of 64 bits, whose low halves are the words; what the
// high halves hold is of no interest. product(a, m): the 64 bits of (low half of a) * m. The caller's, so that a template
// instantiated for one instruction set is not linked into another's code.
constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxStep0 = 0x9E3779B9u, kPhiloxStep1 = 0xBB67AE85u;  // from a round's keys to those of the next

template <typename W, typename Product>
FLASHSDPA_DEVICE constexpr void philox_round(W (&c)[4], W k0, W k1, const Product& product) {
  const W a = product(c[0], 0xD2511F53u), b = product(c[2], 0xCD9E8D57u);
  c[0] = (b >> 32) ^ c[1] ^ k0;
  c[1] = b;
  c[2] = (a >> 32) ^ c[3] ^ k1;
  c[3] = a;
}
template <typename W, typename Product>
FLASHSDPA_DEVICE constexpr void philox4x32(W (&c)[4], W k0, W k1, const Product& product) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    philox_round(c, k0, k1, product);
    k0 += kPhiloxStep0;
    k1 += kPhiloxStep1;
  }
}

}  // namespace flashsdpa
