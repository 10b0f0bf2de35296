// The names of threads, the number that can run at once, and which of two gets a core.
#pragma once

#include <cstddef>

namespace datastates {

// Names the calling thread, for top and debuggers. At most 15 characters.
void NameThread(const char* name) noexcept;

// From now on the calling thread does not take the core of a thread that wakes it: where all cores are busy,
// the trainer ends its poll first. It keeps its share of the cores.
void YieldToWakers() noexcept;

// Counts the cores that the calling thread may run on; at least 1.
size_t UsableCores() noexcept;

}  // namespace datastates
