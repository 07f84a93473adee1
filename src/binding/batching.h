// Rules of torch.func.vmap for the ops.
#pragma once

#include <cstdint>

namespace flashsdpa {

// The level of the transform that runs on this thread, 1 for the outermost. torch's C++ header that says so needs a JSON
// library that its wheel lacks, so _C asks torch's Python module.
using LevelReader = int64_t (*)();
void set_level_reader(LevelReader reader);

}  // namespace flashsdpa
