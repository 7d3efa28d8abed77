;; Prints "quartermaster-verified " and its second argument backwards, and exits. Backwards, so that a runtime that
;; merely echoes its arguments proves nothing.
(module
  (import "wasi_snapshot_preview1" "args_sizes_get" (func $args_sizes_get (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "args_get" (func $args_get (param i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  ;; 0: argc, 4: size of all arguments, 8: iovec, 16: bytes written, 64: pointers (at most 64 arguments),
  ;; 1024: arguments (at most 2 KiB), 4096: output.
  (data (i32.const 4096) "quartermaster-verified ")
  (func (export "_start") (local $from i32) (local $end i32) (local $to i32)
    (drop (call $args_sizes_get (i32.const 0) (i32.const 4)))
    (if (i32.lt_u (i32.load (i32.const 0)) (i32.const 2)) (then (return)))
    (if (i32.gt_u (i32.load (i32.const 0)) (i32.const 64)) (then (return)))
    (if (i32.gt_u (i32.load (i32.const 4)) (i32.const 2048)) (then (return)))
    (drop (call $args_get (i32.const 64) (i32.const 1024)))
    (local.set $from (i32.load (i32.const 68)))
    (local.set $end (local.get $from))
    (block $found
      (loop $next
        (br_if $found (i32.eqz (i32.load8_u (local.get $end))))
        (local.set $end (i32.add (local.get $end) (i32.const 1)))
        (br $next)))
    (local.set $to (i32.const 4119))
    (block $done
      (loop $next
        (br_if $done (i32.le_u (local.get $end) (local.get $from)))
        (local.set $end (i32.sub (local.get $end) (i32.const 1)))
        (i32.store8 (local.get $to) (i32.load8_u (local.get $end)))
        (local.set $to (i32.add (local.get $to) (i32.const 1)))
        (br $next)))
    (i32.store8 (local.get $to) (i32.const 10))
    (i32.store (i32.const 8) (i32.const 4096))
    (i32.store (i32.const 12) (i32.add (i32.sub (local.get $to) (i32.const 4096)) (i32.const 1)))
    (drop (call $fd_write (i32.const 1) (i32.const 8) (i32.const 1) (i32.const 16)))))
