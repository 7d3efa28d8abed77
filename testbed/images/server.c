/* Answers every HTTP request on port 8080 with one line that names its host. */
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

/* As process 1 it would ignore a SIGTERM without a handler, and every pod would take its whole grace period to end. */
static void leave(int signal) {
  (void)signal;
  _exit(0);
}

int main(void) {
  signal(SIGTERM, leave);
  signal(SIGINT, leave);
  signal(SIGPIPE, SIG_IGN);

  char host[256] = "";
  gethostname(host, sizeof host - 1);
  char line[300];
  int length = snprintf(line, sizeof line, "hello from server on %s\n", host);
  char answer[512];
  int size = snprintf(answer, sizeof answer,
                      "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s",
                      length, line);

  int listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int on = 1, off = 0;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons(8080)};
  if (bind(listener, (struct sockaddr *)&any, sizeof any) || listen(listener, 64)) {
    /* A node without IPv6 has only the other family. */
    close(listener);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in any4 = {.sin_family = AF_INET, .sin_port = htons(8080)};
    if (bind(listener, (struct sockaddr *)&any4, sizeof any4) || listen(listener, 64)) {
      perror("can't listen on port 8080");
      return 1;
    }
  }
  printf("serving on 8080\n");
  fflush(stdout);

  for (;;) {
    int client = accept(listener, NULL, NULL);
    if (client < 0) continue;
    struct timeval patience = {.tv_sec = 2};
    setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    /* Closing with unread bytes would reset the connection before the answer is read: take the whole head. */
    char head[8192];
    size_t have = 0;
    while (have < sizeof head - 1) {
      ssize_t got = recv(client, head + have, sizeof head - 1 - have, 0);
      if (got <= 0) break;
      have += (size_t)got;
      head[have] = 0;
      if (strstr(head, "\r\n\r\n")) break;
    }
    if (have) send(client, answer, (size_t)size, 0);
    close(client);
  }
}
