// The functions of PyTorch's OpenMP runtime that the kernels call, by plain threads: the driver then needs no OpenMP
// from the compiler, and ThreadSanitizer sees every synchronisation.
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct Team {
  std::mutex mutex;
  std::condition_variable all_here;
  int size, waiting = 0, round = 0;

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    const int now = round;
    if (++waiting == size) {
      waiting = 0, ++round;
      all_here.notify_all();
    }
    all_here.wait(lock, [&] { return round != now; });
  }
};

thread_local Team* team = nullptr;
thread_local int number = 0;

}  // namespace

extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned);
void GOMP_barrier(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned) {
  Team here;
  here.size = int(threads);
  auto enter = [&](int i) {
    team = &here, number = i;
    function(data);
    team = nullptr, number = 0;
  };
  std::vector<std::thread> others;
  for (int i = 1; i < here.size; ++i) others.emplace_back(enter, i);
  enter(0);
  for (std::thread& other : others) other.join();
}

void GOMP_barrier(void) { team->wait(); }
int omp_get_thread_num(void) { return number; }
int omp_get_num_threads(void) { return team ? team->size : 1; }
