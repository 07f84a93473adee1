// Which scores dropout keeps: a function of (seed, offset, batch, query head, query, key) alone. Forward and backward, tiles,
// splits, threads and instruction sets so drop the same ones, and nothing is stored. No torch, no CUDA here.
//
// Random bits are Philox4x32-7's (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): seven
// is the least number of rounds with which it passes BigCrush there, and they are most of what dropout costs. Each (batch,
// query head) has a stream of its own, the four words (s0, s1, s2, s3) of Philox(key: seed; counter: offset, offset >> 32,
// batch, head). A call Philox(key: s0, s1; counter: block of keys, block of queries, s2, s3) then decides sixteen scores, by a
// byte for each:
//
//   word 0, 1, 2, 3: queries q, q + 1, q + 8, q + 9  x  byte 0, 1, 2, 3 of it: keys k, k + 1, k + 8, k + 9
//   (bits 0 and 3 of q and k are 0)
//
// Of the 2^16 values that 16 bits would have, Dropout::kept = 256 K + r keep a score. Its byte alone says that it is kept, if
// less than K, or dropped, if greater; where it is K, the call's tie byte t, the xor of its sixteen bytes, says whether: t < r.
// Given one byte, t is uniform, so the probability is kept / 2^16 exactly; any fourteen others are independent of both. Two
// scores whose bytes are K in one call share their t, which is all that decisions have to do with each other: a pair in 2^16.
//
// In an accumulator of wgmma or mma a lane holds half of what a call decides, rows r and r + 8 being queries or keys, and the
// lane of row r ^ 1, 4 lanes away, the other half. On the CPU calls of neighbouring blocks of keys fill a vector.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flashsdpa {

constexpr uint32_t kDropoutOne = 1 << 16;  // the probability 1: p is honoured in steps of 2^-16

// How many of 2^16 values keep a score.
constexpr uint32_t dropout_kept(double p) { return kDropoutOne - uint32_t(p * kDropoutOne + 0.5); }

// The index, in a counter, of the block that has a query, or a key.
template <typename Place>
FLASHSDPA_DEVICE constexpr uint32_t dropout_block(Place place) {
  return uint32_t(place >> 4 << 2 | (place >> 1 & 3));
}

// Four decisions at once, or more, of words whose bytes are scores: each is in its byte's upper bit. A score is dropped where
// its byte is not below K, or, where the call's tie byte is less than r, not below K + 1: where a subtraction does not borrow.
constexpr uint32_t kDropoutSigns = 0x80808080u;
FLASHSDPA_DEVICE constexpr uint32_t dropout_bytes(uint32_t kept) { return (kept >> 8) * 0x01010101u; }  // K in each
// What is to be taken off word | kDropoutSigns, so that the upper bits are those of lower parts that do not borrow.
FLASHSDPA_DEVICE constexpr uint32_t dropout_taken_off(uint32_t bytes, bool tie_keeps) {
  return (bytes & ~kDropoutSigns) + (tie_keeps ? 0x01010101u : 0);
}
template <typename W>
FLASHSDPA_DEVICE constexpr W dropout_keeps(W word, W bytes, W no_borrow) {
  return ~((word & ~bytes) | (~(word ^ bytes) & no_borrow));
}

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
