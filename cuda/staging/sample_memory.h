// Page-locked host memory for samples of device sources (engine/tripwire.h).
//
// Apart from the slots: samples live as long as their save, and a slot must return after its own write.
#pragma once

#include <memory>
#include <vector>

#include "device/driver.h"
#include "os/aligned.h"
#include "os/mutex.h"

namespace datastates {

class SampleMemory : public std::enable_shared_from_this<SampleMemory> {
 public:
  SampleMemory(std::shared_ptr<Driver> driver, CuContext context, size_t block_bytes);
  ~SampleMemory();  // no copy into a block is under way

  // A block for one save, one that an earlier save gave back if there is one. Null where memory cannot be
  // had or page-locked: a copy into other memory would make the trainer wait for the device. On the
  // trainer's thread, in its context; the block may be dropped on any.
  std::shared_ptr<uint8_t> Borrow();

 private:
  using Block = std::unique_ptr<PrivateMapping>;
  Block Make() const;
  void Return(Block block) noexcept;

  const std::shared_ptr<Driver> driver_;
  const CuContext context_;
  const size_t block_bytes_;
  Mutex mutex_;
  std::vector<Block> idle_ GUARDED_BY(mutex_);
};

}  // namespace datastates
