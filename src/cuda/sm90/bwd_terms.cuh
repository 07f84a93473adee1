// What soft cap, slopes and dropout do to a consumer's scores of one block of queries, and to their gradient. For both
// arrangements: rows of a lane are keys and columns queries (by keys), or the other way round.
//
// With c the scaled and capped score, Z the factor that dropout gives a weight (0 or `rescale`) and P = exp(c + ... - lse):
//   dV takes Z P, and dS = P (1 - (c / softcap)^2) (Z dP - delta)
// Registers are short. So the factor that the cap gives a gradient is kept in 16 bits until P is there; then dV's operand is made of
// P, and P times that factor, dS's share, is kept in 16 bits until dP is there: a word for each pair of accumulators, by keys in shared
// memory. dP then has the registers of S.
#pragma once

#include "bwd_blocks.cuh"
#include "dropout_bits.cuh"
#include "score_terms.cuh"

namespace flashsdpa {

template <bool kFirst, int kCount, int kOtherCount>
__device__ inline auto& either(float (&first)[kCount], float (&second)[kOtherCount]) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

// Without terms: nothing.
template <typename Tile, bool kTerms = Tile::kTerms>
struct BwdBlockTerms {};

template <typename Tile>
struct BwdBlockTerms<Tile, true> {
  static constexpr int kScores = (Tile::kByKeys ? Tile::kBlockM : Tile::kBlockN / Tile::kConsumers) / 2;  // of a lane
  // Of what is kept in 16 bits: float16 has digits enough for weights and factors up to 1, of any size that matters, if 1 is this.
  static constexpr float kOne = 32768.f;

  static constexpr int kWords = (kScores + 31) / 32;
  uint32_t kept[kWords];  // dropout_bits.cuh

  // `query`, `key`: the lane's first of each. `stream`: where the loader has laid the random bits of the block's head.
  __device__ void draw(const BwdArgs& args, uint32_t stream, int query, int key) {
#pragma unroll
    for (uint32_t& word : kept) word = ~0u;
    if (!args.terms.seed) return;
    constexpr int kGroups = kScores == 16 ? 2 : 4;
    const int row = Tile::kByKeys ? key : query, column = Tile::kByKeys ? query : key;
    DropoutStream(args.terms, stream).draw<Tile::kByKeys, kGroups, kWords>(row, column, kept);
  }

  __device__ bool keeps(int i) const { return is_kept<Tile::kByKeys>(kept, i); }

  // Products become scores without what a mask adds. keep(i, words): the factors of accumulators i to i + 7, also without a cap,
  // for a branch would take registers.
  template <typename Keep>
  __device__ void apply(const BwdArgs& args, int batch, int head, int query, int key, float (&s)[kScores], const Keep& keep) const {
    const ScoreTerms& terms = args.terms;
    const float slope = terms.slopes.data ? value_of_head(terms.slopes, batch, head) : 0.f;
    const float to_tanh = terms.softcap > 0.f ? ptx::reciprocal_fast(terms.softcap) : 0.f;
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {  // eight at a time: the arithmetic of all at once would take registers
      float scores[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) scores[r] = s[i + r];
      scale_and_cap(terms, scores);
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        s[i + 2 * w] = scores[2 * w];
        s[i + 2 * w + 1] = scores[2 * w + 1];
        const float low = scores[2 * w] * to_tanh, high = scores[2 * w + 1] * to_tanh;
        // A removed score may be NaN, of which nothing passes.
        words[w] = ptx::pack<false>(fmaxf(fmaf(low * -kOne, low, kOne), 0.f), fmaxf(fmaf(high * -kOne, high, kOne), 0.f));
      }
      keep(i, words);
    }
    if (slope != 0.f) take_slopes_off(s, slope, Tile::kByKeys ? key - terms.diagonal - query : query + terms.diagonal - key);
  }

  // Of the weights of accumulators i to i + 7: dV's operand, and dS's shares in the place of the cap's factors.
  template <bool kBFloat16>
  __device__ void split(const BwdArgs& args, int i, const float (&s)[kScores], uint32_t (&weights)[4], uint32_t (&shares)[4]) const {
    const float rescale = args.terms.rescale;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int at = i + 2 * w;
      float low, high;
      ptx::unpack<false>(shares[w], low, high);
      shares[w] = ptx::pack<false>(s[at] * low, s[at + 1] * high);
      weights[w] = ptx::pack<kBFloat16>(keeps(at) ? s[at] * rescale : 0.f, keeps(at + 1) ? s[at + 1] * rescale : 0.f);
    }
  }

  // Before `gradient`: else the compiler would keep what it has made of each bit for `split`.
  __device__ void settle() {
#pragma unroll
    for (uint32_t& word : kept) word = ptx::anew(word);
  }
  // dS of accumulators i and i + 1.
  template <bool kBFloat16>
  __device__ uint32_t gradient(const BwdArgs& args, int i, uint32_t share, float dp_low, float dp_high, float delta_low,
                               float delta_high) const {
    constexpr float kUnit = 1.f / kOne;
    const float factor = args.terms.rescale * kUnit;
    float low, high;
    ptx::unpack<false>(share, low, high);
    return ptx::pack<kBFloat16>(low * fmaf(dp_low, keeps(i) ? factor : 0.f, delta_low * -kUnit),
                                high * fmaf(dp_high, keeps(i + 1) ? factor : 0.f, delta_high * -kUnit));
  }
};

}  // namespace flashsdpa
