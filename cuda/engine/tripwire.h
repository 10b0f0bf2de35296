// The sample tripwire: a copy that is torn although every fence stood is found before it is written.
//
// Samples of every lazy source (Batch::samples) are copied when the save begins, before the trainer can
// change anything, and compared with what was staged for the same place of the file. They prove nothing
// when they agree: a change that spares the samples passes. Fences are what keeps copies whole.
#pragma once

#include <memory>
#include <optional>

#include "device/copier.h"
#include "engine/batch.h"

namespace datastates {

class Tripwire {
 public:
  // Copies the samples in host memory, and enqueues the copies of those on a device. `device_memory` is
  // page-locked and has room for kMostDeviceSamples; without it the device's sources are not sampled.
  // After a Failure (the driver's) copies may be under way: this object and that memory must outlive them.
  void Take(const Batch& batch, DeviceCopier* copier, std::shared_ptr<uint8_t> device_memory);

  // The offset in the file of a sample that differs from the chunk's staged bytes, if one does. The
  // device is done with both.
  std::optional<uint64_t> FindChange(const Batch& batch, const Batch::Chunk& chunk,
                                     const uint8_t* staged) const;

 private:
  const uint8_t* Kept(const Sample& sample) const;  // null if it was not taken

  // Constant after Take; sample `place` is at place * kSampleBytes.
  std::unique_ptr<uint8_t[]> host_;
  std::shared_ptr<uint8_t> device_;
};

}  // namespace datastates
