# What Rails' guide does with any of its cache's stores.
def rails_cache(store)
  version ActiveSupport::VERSION::STRING

  check("write read delete") do
    equal !!store.write("k", { a: [1, 2] }), true
    equal store.read("k"), { a: [1, 2] }
    equal store.exist?("k"), true
    equal !!store.delete("k"), true
    equal store.read("k"), nil
  end

  check("fetch") do
    store.delete("f")
    equal [store.fetch("f", expires_in: 300) { 1 }, store.fetch("f") { 2 }, store.fetch("f", force: true) { 3 }], [1, 1, 3]
    equal store.fetch("nothing", skip_nil: true) { nil }, nil
  end

  check("fetch_multi") do
    store.delete("fm1")
    store.delete("fm2")
    store.write("fm1", "there")
    equal store.fetch_multi("fm1", "fm2") { |k| "made #{k}" }, { "fm1" => "there", "fm2" => "made fm2" }
    equal store.read("fm2"), "made fm2"
  end

  check("write_multi read_multi delete_multi") do
    store.write_multi({ "m1" => 1, "m2" => "two" })
    equal store.read_multi("m1", "m2", "absent"), { "m1" => 1, "m2" => "two" }
    equal store.delete_multi(%w[m1 m2]), 2
    equal store.read_multi("m1", "m2"), {}
  end

  check("unless_exist") do
    store.delete("u")
    equal !!store.write("u", 1, unless_exist: true, expires_in: 300), true
    equal !!store.write("u", 2, unless_exist: true, expires_in: 300), false
    equal store.read("u"), 1
  end

  check("increment decrement") do
    store.delete("n")
    store.write("n", 1, raw: true)
    equal store.increment("n"), 2
    equal store.increment("n", 10), 12
    equal store.decrement("n", 2), 10
  end

  check("expiry") do
    store.write("e", 1, expires_in: 0.05)
    deadline = Process.clock_gettime(Process::CLOCK_MONOTONIC) + 10
    sleep 0.02 until store.read("e").nil? || Process.clock_gettime(Process::CLOCK_MONOTONIC) > deadline
    equal store.read("e"), nil
  end

  check("large, compressed") do
    store.write("l", "abc" * 200_000)
    equal store.read("l"), "abc" * 200_000
  end

  check("race condition ttl and versions") do
    store.write("v", 1, version: 1)
    equal store.read("v", version: 1), 1
    equal store.read("v", version: 2), nil
    store.write("r", 1, expires_in: 300, race_condition_ttl: 10)
    equal store.fetch("r", race_condition_ttl: 10) { 2 }, 1
  end
end
