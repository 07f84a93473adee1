// What soft cap, slopes and dropout do to a consumer's scores of one block of queries, and to their gradient. For both
// arrangements: rows of a lane are keys and columns queries (by keys), or the other way round.
//
// With c the scaled and capped score, Z the factor that dropout gives a weight (0 or `rescale`) and P = exp(c + ... - lse):
//   dV takes Z P, and dS = P (1 - (c / softcap)^2) (Z dP - delta)
// Registers are short. So what the cap leaves of a gradient is kept in 16 bits until P is there; then dV's operand is made of P, and
// its product with what the cap leaves is kept in 16 bits until dP is there, which may have the registers of S. All three have one
// place, a word for each pair of accumulators, which becomes dS.
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

  uint32_t kept[(kScores + 31) / 32];  // dropout_bits.cuh

  // Before the wait for S. `query`, `key`: the lane's first of each.
  __device__ void draw(const BwdArgs& args, int batch, int head, int query, int key) {
#pragma unroll
    for (uint32_t& word : kept) word = ~0u;
    if (!args.terms.seed) return;
    const DropoutStream stream(args.terms, batch, head, int(threadIdx.x) % ptx::kWarpLanes);
    if constexpr (Tile::kByKeys) {
      stream.draw_by_keys(key, query, kept);
    } else {
      stream.draw_by_queries(query, key, kept);
    }
  }

  // Products become scores without what a mask adds. share(i): the word of accumulators i and i + 1.
  template <typename Share>
  __device__ void apply(const BwdArgs& args, int batch, int head, int query, int key, float (&s)[kScores], const Share& share) const {
    const ScoreTerms& terms = args.terms;
    const float slope = terms.slopes.data ? value_of_head(terms.slopes, batch, head) : 0.f;
    scale_and_cap(terms, s);
    const float to_tanh = terms.softcap > 0.f ? ptx::reciprocal_fast(terms.softcap) : 0.f;
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const float low = s[i] * to_tanh, high = s[i + 1] * to_tanh;
      // A removed score may be NaN, of which nothing passes.
      share(i) = ptx::pack<false>(fmaxf(fmaf(low * -kOne, low, kOne), 0.f), fmaxf(fmaf(high * -kOne, high, kOne), 0.f));
    }
    if (slope != 0.f) take_slopes_off(s, slope, Tile::kByKeys ? key - terms.diagonal - query : query + terms.diagonal - key);
  }

  // Of the weights of accumulators i and i + 1: dV's operand, and what dS takes of them.
  template <bool kBFloat16>
  __device__ uint32_t split(const BwdArgs& args, int i, float low, float high, uint32_t& share) const {
    const float rescale = args.terms.rescale;
    float passed_low, passed_high;
    ptx::unpack<false>(share, passed_low, passed_high);
    share = ptx::pack<false>(low * passed_low, high * passed_high);
    return ptx::pack<kBFloat16>(is_kept(kept, i) ? low * rescale : 0.f, is_kept(kept, i + 1) ? high * rescale : 0.f);
  }

  // dS of accumulators i and i + 1.
  template <bool kBFloat16>
  __device__ uint32_t gradient(const BwdArgs& args, int i, uint32_t share, float dp_low, float dp_high, float delta_low,
                               float delta_high) const {
    constexpr float kUnit = 1.f / kOne;
    const float factor = args.terms.rescale * kUnit;
    float low, high;
    ptx::unpack<false>(share, low, high);
    return ptx::pack<kBFloat16>(low * fmaf(dp_low, is_kept(kept, i) ? factor : 0.f, delta_low * -kUnit),
                                high * fmaf(dp_high, is_kept(kept, i + 1) ? factor : 0.f, delta_high * -kUnit));
  }
};

}  // namespace flashsdpa
