// Page-locked host memory for samples of device sources (engine/tripwire.h). It is separate from the pool
// because samples live as long as their save, and a slot must return after its own write.
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
  ~SampleMemory();  // no copy into a block may be under way, unless it was abandoned

  // Returns a block for one save, reusing one that an earlier save returned. Null if memory cannot be
  // allocated or page-locked: a copy into other memory would make the trainer wait for the device. Called on
  // the trainer's thread, in its context; any thread may drop the block.
  std::shared_ptr<uint8_t> Borrow();
  // Keeps every block mapped for ever, because a device may still write to one. They are lent as before: what
  // is copied into them later is after that in the order of the stream.
  void Abandon() noexcept;

 private:
  using Block = std::unique_ptr<PrivateMapping>;
  Block Make();
  void Return(Block block) noexcept;

  const std::shared_ptr<Driver> driver_;
  const CuContext context_;
  const size_t block_bytes_;
  Mutex mutex_;
  bool is_abandoned_ GUARDED_BY(mutex_) = false;
  size_t made_ GUARDED_BY(mutex_) = 0;          // blocks, and attempts at one
  std::vector<Block> idle_ GUARDED_BY(mutex_);  // has room for made_ blocks, so Return never throws
};

}  // namespace datastates
