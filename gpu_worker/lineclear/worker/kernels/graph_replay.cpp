// Replays captured kernel calls in one native call, as CUDA graphs do: for one row, a call from Python takes about as long
// as the kernel.

#include <chrono>
#include <cstdint>

extern "C" {

// A function exported by `CAPTURABLE` (graph_capture.h) and the addresses of its arguments.
struct LineclearCall {
  void (*kernel)(void* const* arguments);
  void* const* arguments;
};

// Make `count` calls, in order. nanoseconds [count]: the duration of each, or null.
void lineclear_replay(const LineclearCall* calls, int64_t count, int64_t* nanoseconds) {
  using Clock = std::chrono::steady_clock;
  for (int64_t i = 0; i < count; i++) {
    const auto begin = nanoseconds ? Clock::now() : Clock::time_point{};
    calls[i].kernel(calls[i].arguments);
    if (nanoseconds) nanoseconds[i] = std::chrono::nanoseconds(Clock::now() - begin).count();
  }
}
}
