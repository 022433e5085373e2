# dalli.rb REDIS MEMCACHED DB: Dalli.
require "dalli"
require_relative "check"

Dalli.logger.level = Logger::FATAL
version Dalli::VERSION
dc = Dalli::Client.new("127.0.0.1:#{MEMCACHED}", namespace: "dalli", socket_timeout: 2, expires_in: 300, compress: true)

check("set get delete") do
  dc.set("abc", { "a" => [1, 2] })
  equal dc.get("abc"), { "a" => [1, 2] }
  equal dc.get("absent"), nil
  equal dc.delete("abc"), true
  equal dc.get("abc"), nil
end

check("add and replace") do
  dc.delete("x")
  equal [false, 0].include?(dc.replace("x", 1)), true
  equal !!dc.add("x", 1), true
  equal dc.add("x", 2), false
  equal !!dc.replace("x", 3), true
  equal dc.get("x"), 3
end

check("get_multi") do
  dc.multi { 10.times { |i| dc.set("m#{i}", i) } }
  equal dc.get_multi(*10.times.map { |i| "m#{i}" }, "absent"), 10.times.to_h { |i| ["m#{i}", i] }
end

check("fetch") do
  dc.delete("f")
  equal [dc.fetch("f") { 1 }, dc.fetch("f") { 2 }], [1, 1]
end

check("counters") do
  dc.delete("n")
  equal dc.incr("n", 1, nil, 5), 5
  equal dc.incr("n", 10), 15
  equal dc.decr("n", 20), 0
end

check("append") do
  dc.set("r", "a", 300, raw: true)
  equal !!dc.append("r", "b"), true
  equal !!dc.prepend("r", "c"), true
  equal dc.get("r", raw: true), "cab"
end

check("cas") do
  dc.set("c", 1)
  equal !!dc.cas("c") { |v| v + 1 }, true
  equal dc.get("c"), 2
  equal dc.cas("c") { |v| dc.set("c", 10); v + 1 }, false
  equal dc.get("c"), 10
end

check("touch and gat") do
  dc.set("t", 1)
  equal dc.touch("t", 300), true
  equal dc.gat("t", 300), 1
  equal dc.touch("absent", 300), nil
end

check("large, compressed") do
  v = "abc" * 200_000
  dc.set("l", v)
  equal dc.get("l"), v
end

check("stats and version") do
  equal dc.version.values.first.match?(/^\d+\./), true
  equal dc.stats.values.first.key?("curr_items"), true
end
