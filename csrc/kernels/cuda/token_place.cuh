// Where a token of a step stands. For every params struct that step_tokens.h reads.
#pragma once

#include "kernels/cuda/instructions.cuh"
#include "kernels/step_tokens.h"

namespace hetkv::gpu {

struct TokenPlace {
  std::int64_t sequence = 0;
  std::int64_t position = -1;  // -1: the token belongs to no sequence
};

template <typename Params>
HETKV_DEVICE_INLINE TokenPlace token_place(const Params& params, std::int64_t token) {
  TokenPlace place;
  place.sequence = sequence_of(params, token);
  if (place.sequence == params.num_sequences) return place;
  const StepTokens tokens = step_tokens(params, place.sequence);
  const std::int64_t step = token - tokens.first_token;
  if (step >= 0 && step < tokens.count) place.position = tokens.first_position + step;
  return place;
}

}  // namespace hetkv::gpu
