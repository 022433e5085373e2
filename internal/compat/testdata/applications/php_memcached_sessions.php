<?php
// php_memcached_sessions.php REDIS MEMCACHED DB: PHP's sessions in memcached, with locks, by both protocols.
require __DIR__ . '/check.php';
require __DIR__ . '/sessions.php';

version(phpversion('memcached'));
foreach (['text' => '0', 'binary' => '1'] as $name => $binary) {
    check_sessions([
        'session.save_handler' => 'memcached',
        'session.save_path' => "127.0.0.1:$memcached",
        'memcached.sess_binary_protocol' => $binary,
        'memcached.sess_prefix' => "php_memcached.$name.",
        'memcached.sess_locking' => '1',
        'memcached.sess_lock_wait_min' => '10',
        'memcached.sess_lock_wait_max' => '10',
        'memcached.sess_lock_retries' => '500',
        'memcached.sess_connect_timeout' => '1000',
    ], $name);
}
echo "done\n";
