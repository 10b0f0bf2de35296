#include "engine/batch.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "os/aligned.h"

namespace datastates {
namespace {

void CheckRuns(const std::vector<Run>& runs, uint64_t begin, uint64_t end) {
  uint64_t at = begin;
  for (const Run& run : runs) {
    if (run.bytes != 0 && (run.piece_bytes == 0 || run.bytes % run.piece_bytes != 0)) {
      throw Failure("plan copies", "", 0,
                    "run of " + std::to_string(run.bytes) + " bytes at offset " + std::to_string(run.offset) +
                        " is no whole number of pieces of " + std::to_string(run.piece_bytes));
    }
    if (run.offset < at || run.bytes > end || run.offset > end - run.bytes) {
      throw Failure("plan copies", "", 0,
                    "run of " + std::to_string(run.bytes) + " bytes at offset " + std::to_string(run.offset) +
                        " overlaps its predecessor or leaves [" + std::to_string(begin) + ", " +
                        std::to_string(end) + ")");
    }
    at = run.offset + run.bytes;
  }
}

std::vector<Run> Coalesce(std::vector<Run> runs) {
  size_t kept = 0;
  for (Run run : runs) {
    if (run.bytes == 0) continue;
    if (run.step_bytes == run.piece_bytes) run.piece_bytes = run.bytes;
    if (kept > 0) {
      Run& last = runs[kept - 1];
      const bool contiguous = last.piece_bytes == last.bytes && run.piece_bytes == run.bytes;
      if (contiguous && last.source + last.bytes == run.source && last.offset + last.bytes == run.offset &&
          last.storage == run.storage && last.eager == run.eager && last.device == run.device) {
        last.piece_bytes = last.bytes += run.bytes;
        continue;
      }
    }
    runs[kept++] = run;
  }
  runs.resize(kept);
  return runs;
}

}  // namespace

Batch::Batch(uint64_t begin, uint64_t end, uint64_t chunk_bytes, bool fenced, std::vector<Run> runs,
             uint64_t seed)
    : fenced_(fenced), seed_(seed) {
  if (begin % kAlignment != 0 || end % kAlignment != 0 || begin > end) {
    throw Failure("plan copies", "", 0,
                  "a batch begins and ends at multiples of " + std::to_string(kAlignment));
  }
  CheckRuns(runs, begin, end);
  if (fenced) samples_ = ChooseSamples(runs, begin, chunk_bytes, seed);
  runs_ = Coalesce(std::move(runs));
  size_t run = 0;
  for (uint64_t at = begin; at < end; at += chunk_bytes) {
    Chunk chunk{at, std::min(chunk_bytes, end - at), run, false, false};
    const uint64_t chunk_end = chunk.offset + chunk.bytes;
    for (size_t i = run; i < runs_.size() && runs_[i].offset < chunk_end; ++i) {
      chunk.eager |= runs_[i].eager;
      chunk.device |= runs_[i].device;
    }
    // The next chunk begins with the first run that reaches beyond this one.
    while (run < runs_.size() && runs_[run].offset + runs_[run].bytes <= chunk_end) ++run;
    chunks_.push_back(chunk);
  }
}

}  // namespace datastates
