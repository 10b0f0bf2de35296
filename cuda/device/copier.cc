#include "device/copier.h"

namespace datastates {

DeviceCopier::DeviceCopier(std::shared_ptr<Driver> driver)
    : driver_(std::move(driver)),
      context_(driver_->CurrentContext()),
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

std::shared_ptr<Event> DeviceCopier::Record() {
  auto event = std::make_shared<Event>(driver_, context_);
  driver_->Record(event->get(), stream_);
  return event;
}

}  // namespace datastates
