#include "engine/tripwire.h"

#include <algorithm>
#include <cstring>

#include "engine/crc32c.h"

namespace datastates {
namespace {

// Returns a checksum of the bytes that the second look covers in a chunk: in `staged`, or in the sources if
// null.
uint32_t LookAt(const Batch& batch, const Batch::Chunk& chunk, const uint8_t* staged) {
  uint32_t crc = 0;
  const uint64_t end = chunk.offset + chunk.bytes;
  for (size_t i = chunk.first_span; i < batch.spans().size() && batch.spans()[i].offset < end; ++i) {
    const Span& span = batch.spans()[i];
    if (span.eager || span.device) continue;
    const uint64_t to = std::min(span.offset + span.bytes, end);
    for (uint64_t from = std::max(span.offset, chunk.offset); from < to; from += Tripwire::kLookBytes) {
      const Sample place = SampleIn(span, from, std::min(from + Tripwire::kLookBytes, to), batch.seed());
      crc = Crc32c(crc,
                   staged == nullptr ? reinterpret_cast<const uint8_t*>(place.source)
                                     : staged + (place.offset - chunk.offset),
                   place.bytes);
    }
  }
  return crc;
}

}  // namespace

void Tripwire::Take(const Batch& batch, DeviceCopier* copier, std::shared_ptr<uint8_t> device_memory) {
  device_ = std::move(device_memory);
  const Samples& samples = batch.samples();
  host_.reset(new uint8_t[samples.host * kSampleBytes]);
  auto grid = samples.grids.begin();
  uint32_t after_grid = 0;  // the first place after the grids so far
  for (const Sample& sample : samples.all) {
    if (!sample.device) {
      std::memcpy(&host_[sample.place * kSampleBytes], reinterpret_cast<const void*>(sample.source),
                  sample.bytes);
    } else if (grid != samples.grids.end() && grid->place == sample.place) {
      after_grid = grid->place + grid->rows;
      ++grid;
    } else if (device_ && sample.place >= after_grid) {
      copier->CopyRowsAtOnce(device_.get() + sample.place * kSampleBytes, sample.source, sample.bytes, 0, 1);
    }
  }
  if (!device_) return;
  for (const Grid& rows : samples.grids) {
    copier->CopyRowsAtOnce(device_.get() + rows.place * kSampleBytes, rows.source, kSampleBytes,
                           rows.row_step, rows.rows);
  }
}

void Tripwire::Look(const Batch& batch, const std::function<bool()>& give_up) {
  std::vector<uint32_t> looks;
  looks.reserve(batch.chunks().size());
  for (const Batch::Chunk& chunk : batch.chunks()) {
    if (give_up()) return;
    looks.push_back(chunk.eager ? 0 : LookAt(batch, chunk, nullptr));
  }
  looks_ = std::move(looks);
}

const uint8_t* Tripwire::Kept(const Sample& sample) const {
  const uint8_t* const memory = sample.device ? device_.get() : host_.get();
  return memory == nullptr ? nullptr : memory + sample.place * kSampleBytes;
}

std::optional<Tripwire::Change> Tripwire::FindChange(const Batch& batch, size_t number,
                                                     const uint8_t* staged) const {
  const auto& samples = batch.samples().all;
  const Batch::Chunk& chunk = batch.chunks()[number];
  const uint64_t end = chunk.offset + chunk.bytes;
  // A sample may lie across the border of two chunks: each chunk is compared with its part.
  auto sample = std::partition_point(samples.begin(), samples.end(),
                                     [&](const Sample& s) { return s.offset + s.bytes <= chunk.offset; });
  for (; sample != samples.end() && sample->offset < end; ++sample) {
    const uint8_t* const kept = Kept(*sample);
    const uint64_t from = std::max(sample->offset, chunk.offset);
    const uint64_t bytes = std::min(sample->offset + sample->bytes, end) - from;
    if (kept != nullptr &&
        std::memcmp(kept + (from - sample->offset), staged + (from - chunk.offset), bytes) != 0) {
      return Change{sample->offset, 1};
    }
  }
  // An eager chunk may be verified while another thread is still at the second look: nothing of that is read.
  if (chunk.eager || looks_.empty() || looks_[number] == LookAt(batch, chunk, staged)) return std::nullopt;
  return Change{chunk.offset, chunk.bytes};
}

}  // namespace datastates
