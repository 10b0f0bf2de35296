#include "staging/sample_memory.h"

namespace datastates {

SampleMemory::SampleMemory(std::shared_ptr<Driver> driver, CuContext context, size_t block_bytes)
    : driver_(std::move(driver)), context_(context), block_bytes_(block_bytes) {}

SampleMemory::~SampleMemory() {
  const ContextScope scope(*driver_, context_);
  const RelaxedCapture relaxed(*driver_);
  for (Block& block : idle_) {
    if (is_abandoned_ || !driver_->UnregisterHost(block->data())) static_cast<void>(block.release());
  }
}

std::shared_ptr<uint8_t> SampleMemory::Borrow() {
  Block block;
  {
    const MutexLock lock(mutex_);
    if (!idle_.empty()) {
      block = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!block) block = Make();
  if (!block) return nullptr;
  uint8_t* const data = block->data();
  return {data, [home = shared_from_this(), held = block.release()](uint8_t*) { home->Return(Block(held)); }};
}

void SampleMemory::Abandon() noexcept {
  const MutexLock lock(mutex_);
  is_abandoned_ = true;
}

SampleMemory::Block SampleMemory::Make() {
  try {
    {
      const MutexLock lock(mutex_);
      idle_.reserve(++made_);
    }
    auto block = std::make_unique<PrivateMapping>(block_bytes_);
    block->Prefault();
    const RelaxedCapture relaxed(*driver_);
    driver_->RegisterHost(block->data(), block->bytes());
    return block;
  } catch (const std::exception&) {
    return nullptr;
  }
}

void SampleMemory::Return(Block block) noexcept {
  const MutexLock lock(mutex_);
  idle_.push_back(std::move(block));
}

}  // namespace datastates
