// Forks of the trainer in mid-save, by data loaders and by Megatron's retention. A forked child must keep no
// data file open and must not wait for the engine's threads, which it does not have.
#pragma once

namespace datastates {

// Has a forked child close `fd` before it runs anything else, until ForgetDescriptor. To be called right
// after the file is opened, before any call on it, which may take long.
void CloseInForkedChild(int fd);
// The same; if there is no memory for it, closes `fd` and throws std::bad_alloc.
void CloseInForkedChildOrNow(int fd);
void ForgetDescriptor(int fd);

// The process that created an object. In a fork of that process, the object's copy must do nothing.
class HomeProcess {
 public:
  HomeProcess();
  bool IsHere() const;

 private:
  int pid_;  // constant after construction
};

}  // namespace datastates
