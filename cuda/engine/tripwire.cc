#include "engine/tripwire.h"

#include <algorithm>
#include <cstring>

namespace datastates {

void Tripwire::Take(const Batch& batch, DeviceCopier* copier, std::shared_ptr<uint8_t> device_memory) {
  device_ = std::move(device_memory);
  host_.reset(new uint8_t[batch.samples().size() * kSampleBytes]);
  std::vector<DeviceCopier::Piece> pieces;
  for (const Sample& sample : batch.samples()) {
    if (!sample.device) {
      std::memcpy(&host_[sample.place * kSampleBytes], reinterpret_cast<const void*>(sample.source),
                  sample.bytes);
    } else if (device_) {
      pieces.push_back({device_.get() + sample.place * kSampleBytes, sample.source, sample.bytes});
    }
  }
  if (!pieces.empty()) copier->CopyAtOnce(pieces);
}

const uint8_t* Tripwire::Kept(const Sample& sample) const {
  const uint8_t* const memory = sample.device ? device_.get() : host_.get();
  return memory == nullptr ? nullptr : memory + sample.place * kSampleBytes;
}

std::optional<uint64_t> Tripwire::FindChange(const Batch& batch, const Batch::Chunk& chunk,
                                             const uint8_t* staged) const {
  const auto& samples = batch.samples();
  const uint64_t end = chunk.offset + chunk.bytes;
  // A sample may lie across the border of two chunks: each is compared with its part.
  auto sample = std::partition_point(samples.begin(), samples.end(),
                                     [&](const Sample& s) { return s.offset + s.bytes <= chunk.offset; });
  for (; sample != samples.end() && sample->offset < end; ++sample) {
    const uint8_t* const kept = Kept(*sample);
    const uint64_t from = std::max(sample->offset, chunk.offset);
    const uint64_t bytes = std::min(sample->offset + sample->bytes, end) - from;
    if (kept != nullptr &&
        std::memcmp(kept + (from - sample->offset), staged + (from - chunk.offset), bytes) != 0) {
      return sample->offset;
    }
  }
  return std::nullopt;
}

}  // namespace datastates
