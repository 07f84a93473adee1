// What kernels with terms (FwdTile::kTerms and the backward's like) are told besides: soft cap, slopes, sinks and dropout of
// the call, as params.h has them.
#pragma once

#include "../../dropout.h"
#include "../../params.h"

namespace flashsdpa {

struct ScoreTerms {
  // A score is the product q . k times `scale`, or `softcap` * tanh(product * `to_cap`). Then come slopes and mask, and nothing
  // is left to be scaled: the kernels' own scale is 1. But with dropout alone all is scaled as it is without terms, and this
  // scale is 1.
  float scale;    // the caller's, of any sign
  float softcap;  // 0: none
  float to_cap;   // scale / softcap
  HeadView slopes;
  int32_t diagonal;  // the distance of query i and key j is |i + diagonal - j|
  HeadView sinks;
  const int64_t* seed;  // null: no dropout
  const int64_t* offset;
  uint32_t kept;  // of 2^16; less than that, for a call that keeps all has no dropout
  float rescale;  // of the output; 1 without dropout
};

// By what is kept: a description of a call has no seed.
inline bool has_dropout(const Problem& p) { return p.dropout.kept < kDropoutOne; }

inline bool has_score_terms(const Problem& p) {
  return p.softcap > 0 || p.slopes.data || p.sinks.data || has_dropout(p);
}

// Whether something becomes of scores, so that they must be scaled first.
inline bool changes_scores(const Problem& p) { return p.softcap > 0 || p.slopes.data || p.sinks.data; }

inline ScoreTerms make_score_terms(const Problem& p) {
  ScoreTerms terms{};
  terms.scale = changes_scores(p) ? static_cast<float>(p.scale) : 1.f;
  if (p.softcap > 0) {
    terms.softcap = static_cast<float>(p.softcap);
    terms.to_cap = static_cast<float>(p.scale / p.softcap);
  }
  terms.slopes = p.slopes;
  terms.diagonal = static_cast<int32_t>(p.diagonal);
  terms.sinks = p.sinks;
  terms.rescale = 1.f;
  if (has_dropout(p)) {
    terms.seed = p.dropout.seed;
    terms.offset = p.dropout.offset;
    terms.kept = p.dropout.kept;
    terms.rescale = static_cast<float>(p.dropout.rescale);
  }
  return terms;
}

}  // namespace flashsdpa
