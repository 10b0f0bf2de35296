// Data loaders and Megatron's retention fork the trainer in mid-save. A child keeps no data file open
// and must never touch the engine's threads, which it does not have.
#pragma once

namespace datastates {

// From now until ForgetDescriptor, a forked child closes `fd` before anything else of it runs.
void CloseInForkedChild(int fd);
void ForgetDescriptor(int fd);

// The process that made an object; a fork of it has a copy that must do nothing.
class HomeProcess {
 public:
  HomeProcess();
  bool IsHere() const;

 private:
  int pid_;  // constant after construction
};

}  // namespace datastates
