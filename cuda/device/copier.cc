#include "device/copier.h"

namespace datastates {

DeviceCopier::DeviceCopier(std::shared_ptr<Driver> driver)
    : driver_(std::move(driver)),
      context_(driver_->CurrentContext()),
      device_(driver_->CurrentDevice()),
      last_(driver_, context_),
      stream_(driver_->CreateLowPriorityStream()) {}

DeviceCopier::~DeviceCopier() {
  const ContextScope scope(*driver_, context_);
  driver_->DestroyStream(stream_);
}

void DeviceCopier::StartAfter(CuStream trainer) {
  Event now(driver_, context_);
  driver_->Record(now.get(), trainer);
  driver_->StreamWait(stream_, now.get());
}

void DeviceCopier::EnterThread() const {
  driver_->SetContext(context_);
  driver_->RelaxCapture();
}

void DeviceCopier::CopyPieces(uint8_t* target, CuPointer source, size_t bytes, size_t step_bytes,
                              size_t pieces) {
  if (pieces > 1 && step_bytes >= bytes && step_bytes <= Driver::kMostPitch) {
    return driver_->CopyRowsToHost(target, source, bytes, step_bytes, pieces, stream_);
  }
  for (size_t i = 0; i < pieces; ++i) Copy(target + i * bytes, source + i * step_bytes, bytes);
}

void DeviceCopier::CopyToDevice(CuPointer target, size_t target_step, const uint8_t* source,
                                size_t source_step, size_t bytes, size_t pieces) {
  const auto fits = [bytes](size_t pitch) { return pitch >= bytes && pitch <= Driver::kMostPitch; };
  if (pieces > 1 && fits(target_step) && fits(source_step)) {
    return driver_->CopyRowsToDevice(target, target_step, source, source_step, bytes, pieces, stream_);
  }
  for (size_t i = 0; i < pieces; ++i) {
    driver_->CopyToDevice(target + i * target_step, source + i * source_step, bytes, stream_);
  }
}

std::shared_ptr<Event> DeviceCopier::Record() {
  auto event = std::make_shared<Event>(driver_, context_);
  driver_->Record(event->get(), stream_);
  return event;
}

void DeviceCopier::WaitForAll() {
  std::lock_guard<std::mutex> lock(waiting_for_all_);
  driver_->Record(last_.get(), stream_);
  Wait(last_);
}

}  // namespace datastates
