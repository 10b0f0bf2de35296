#include "engine/batch.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "os/aligned.h"

namespace datastates {
namespace {

void CheckSpans(const std::vector<Span>& spans, uint64_t begin, uint64_t end) {
  uint64_t at = begin;
  for (const Span& span : spans) {
    if (span.bytes != 0 && (span.row_bytes == 0 || span.bytes % span.row_bytes != 0)) {
      throw Failure("plan copies", "", 0,
                    "span of " + std::to_string(span.bytes) + " bytes at offset " +
                        std::to_string(span.offset) + " is not a whole number of rows of " +
                        std::to_string(span.row_bytes));
    }
    if (span.offset < at || span.bytes > end || span.offset > end - span.bytes) {
      throw Failure("plan copies", "", 0,
                    "span of " + std::to_string(span.bytes) + " bytes at offset " +
                        std::to_string(span.offset) + " overlaps the span before it or leaves [" +
                        std::to_string(begin) + ", " + std::to_string(end) + ")");
    }
    at = span.offset + span.bytes;
  }
}

std::vector<Span> Coalesce(std::vector<Span> spans) {
  size_t kept = 0;
  for (Span span : spans) {
    if (span.bytes == 0) continue;
    if (span.row_step == span.row_bytes) span.row_bytes = span.bytes;
    if (kept > 0) {
      Span& last = spans[kept - 1];
      const bool contiguous = last.row_bytes == last.bytes && span.row_bytes == span.bytes;
      if (contiguous && last.source + last.bytes == span.source && last.offset + last.bytes == span.offset &&
          last.storage == span.storage && last.eager == span.eager && last.device == span.device) {
        last.row_bytes = last.bytes += span.bytes;
        continue;
      }
    }
    spans[kept++] = span;
  }
  spans.resize(kept);
  return spans;
}

}  // namespace

Batch::Batch(uint64_t begin, uint64_t end, uint64_t chunk_bytes, bool fenced, std::vector<Span> spans,
             uint64_t seed)
    : fenced_(fenced), seed_(seed) {
  if (begin % kAlignment != 0 || end % kAlignment != 0 || begin > end) {
    throw Failure("plan copies", "", 0,
                  "a batch must begin and end at multiples of " + std::to_string(kAlignment) + ", not at " +
                      std::to_string(begin) + " and " + std::to_string(end));
  }
  CheckSpans(spans, begin, end);
  if (fenced) samples_ = ChooseSamples(spans, begin, chunk_bytes, seed);
  spans_ = Coalesce(std::move(spans));
  size_t span = 0;
  for (uint64_t at = begin; at < end; at += chunk_bytes) {
    Chunk chunk{at, std::min(chunk_bytes, end - at), span, false, false};
    const uint64_t chunk_end = chunk.offset + chunk.bytes;
    for (size_t i = span; i < spans_.size() && spans_[i].offset < chunk_end; ++i) {
      chunk.eager |= spans_[i].eager;
      chunk.device |= spans_[i].device;
    }
    // The next chunk begins with the first span that reaches beyond this one.
    while (span < spans_.size() && spans_[span].offset + spans_[span].bytes <= chunk_end) ++span;
    chunks_.push_back(chunk);
    if (chunk.eager) eager_end_ = chunks_.size();
  }
}

}  // namespace datastates
