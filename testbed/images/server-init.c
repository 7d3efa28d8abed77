/* An init container that has nothing to do: says so and succeeds. */
#include <stdio.h>

int main(void) {
  puts("ready");
  return 0;
}
