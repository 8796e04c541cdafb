// Plays recorded calls: for one row, going from Python into a kernel and back takes as long as many a kernel.

#include <chrono>
#include <cstdint>

extern "C" {

// One of the functions that `RECORDABLE` makes (recorded.h), and the place of each of its arguments.
struct LineclearCall {
  void (*kernel)(void* const* places);
  void* const* places;
};

// Make `count` calls, in order. nanoseconds [count]: what each took, or null.
void lineclear_play(const LineclearCall* calls, int64_t count, int64_t* nanoseconds) {
  using Clock = std::chrono::steady_clock;
  for (int64_t i = 0; i < count; i++) {
    const auto begin = nanoseconds ? Clock::now() : Clock::time_point{};
    calls[i].kernel(calls[i].places);
    if (nanoseconds) nanoseconds[i] = std::chrono::nanoseconds(Clock::now() - begin).count();
  }
}
}
