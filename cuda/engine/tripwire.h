// The sample tripwire: a copy that is torn although every fence stood is found before it is written.
//
// Samples of every lazy source (engine/sampling.h) are copied when the save begins, before the trainer can
// change anything, and compared with what was staged for the same place of the file. Lazy sources in host
// memory get a second look, on a worker and before their copies begin: it costs the trainer nothing, so it is
// at many more places, and it finds what changes between it and the copy. Samples prove nothing when they
// agree: a change that spares them passes. Fences are what keeps copies whole.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "device/copier.h"
#include "engine/batch.h"

namespace datastates {

class Tripwire {
 public:
  // Of a source, so many bytes have one place of the second look. 64 bytes of each 16 KiB are read in a
  // twentieth of the time that a copy takes; of each 4 KiB, in a third.
  static constexpr uint64_t kLookBytes = uint64_t{16} << 10;

  struct Change {
    uint64_t offset, bytes;  // in the file; what changed is somewhere in it
  };

  // Copies the samples in host memory, and enqueues the copies of those on a device. `device_memory` is
  // page-locked and has room for kMostDeviceSamples; without it the device's sources are not sampled.
  // After a Failure (the driver's) copies may be under way: this object and that memory must outlive them.
  void Take(const Batch& batch, DeviceCopier* copier, std::shared_ptr<uint8_t> device_memory);

  // The second look, at what is in host memory and in no eager chunk. Ends early if `give_up`.
  void Look(const Batch& batch, const std::function<bool()>& give_up);

  // Where the chunk's staged bytes differ from what was seen of their sources, if they do. The device is
  // done with both.
  std::optional<Change> FindChange(const Batch& batch, size_t chunk, const uint8_t* staged) const;

 private:
  const uint8_t* Kept(const Sample& sample) const;  // null if it was not taken

  // Constant after Take; sample `place` is at place * kSampleBytes.
  std::unique_ptr<uint8_t[]> host_;
  std::shared_ptr<uint8_t> device_;
  // A checksum a chunk; constant after Look, and empty if that was not done.
  std::vector<uint32_t> looks_;
};

}  // namespace datastates
