// Reports of changed dictionaries, which Python 3.12 and newer can be asked for (of 3.13, not all releases).
//
// One counter is for all that is watched. As long as it stays what it was, each watched dictionary holds what
// it held: the same objects, in the same order; and it still exists, and so do they. The GIL must be held.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace datastates {

constexpr uint64_t kUnknownChanges = 0;

// Increases with every change that may matter; kUnknownChanges, for ever, where Python does not report them.
uint64_t ChangeCount();

// Watches a dictionary, as long as it exists: counts every change.
void WatchDictionary(nanobind::handle dictionary);

// Watches the __dict__ of an object: counts changes under the names that were passed to `WatchName`.
void WatchAttributes(nanobind::handle dictionary);
void WatchName(nanobind::handle interned);

}  // namespace datastates
