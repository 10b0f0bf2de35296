// The tripwire: finds most copies that are torn (mix two states of their source) before they are written,
// even if every fence was called. Choosing the places is engine/sampling.h's.
//
// Samples of every lazy source are copied when the save begins, before the trainer can change anything, and
// compared with what was staged for the same bytes of the file. Lazy sources in host memory also get a second
// look, by a staging thread before their copies begin: it costs the trainer nothing, so it covers many more
// places, and it finds what changes between itself and the copy. Samples that agree prove nothing: a change
// elsewhere passes. It is the fences that keep copies whole.
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
  // The second look reads 64 bytes of every kLookBytes of a source. At 16 KiB it takes a twentieth of the
  // time of a copy; at 4 KiB, a third.
  static constexpr uint64_t kLookBytes = uint64_t{16} << 10;

  struct Change {
    uint64_t offset, bytes;  // a range of the file in which something changed
  };

  // Copies the samples in host memory and enqueues copies of those on a device. `device_memory` is
  // page-locked and has room for kMostDeviceSamples; without it sources on the device are not sampled. After
  // a Failure (of the driver) copies may be under way: this object and that memory must outlive them.
  void Take(const Batch& batch, DeviceCopier* copier, std::shared_ptr<uint8_t> device_memory);

  // Takes the second look, at host memory outside eager chunks. Ends early once `give_up` returns true.
  void Look(const Batch& batch, const std::function<bool()>& give_up);

  // Returns where the chunk's staged bytes differ from the samples or the second look, if they do. The device
  // must be done with both.
  std::optional<Change> FindChange(const Batch& batch, size_t chunk, const uint8_t* staged) const;

 private:
  const uint8_t* Kept(const Sample& sample) const;  // null if it was not taken

  // Constant after Take; sample `place` is at place * kSampleBytes.
  std::unique_ptr<uint8_t[]> host_;
  std::shared_ptr<uint8_t> device_;
  // One checksum per chunk; constant after Look, and empty without one.
  std::vector<uint32_t> looks_;
};

}  // namespace datastates
