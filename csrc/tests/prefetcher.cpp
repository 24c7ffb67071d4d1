// Prefetched memory: each line once, and nothing after the last one, however often `advance` is called.
#include <stdio.h>

#include "../vectors/prefetcher.h"

int main() {
  static char memory[1024];
  struct {
    int64_t before[8];  // where an index below the first part would write
    Prefetcher prefetcher;
  } kept = {};
  Prefetcher& prefetcher = kept.prefetcher;
  for (int lines = 1; lines <= 16; ++lines) {
    prefetcher.clear();
    prefetcher.add(memory, 64 * lines, false);
    prefetcher.add(memory, 64, true);
    prefetcher.within(lines);
    const int64_t due = prefetcher.due(1);  // of a loop that goes on after the last line
    for (int i = 0; i < 4 * lines; ++i) prefetcher.advance(due);
    if (prefetcher.due(1) != 0) return fprintf(stderr, "%d lines: something is left\n", lines), 1;
  }
  for (int64_t value : kept.before)
    if (value != 0) return fputs("something in front of the parts was written\n", stderr), 1;
  puts("passed");
}
