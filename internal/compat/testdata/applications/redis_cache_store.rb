# redis_cache_store.rb REDIS MEMCACHED DB: Rails' cache in Redis.
require "active_support"
require "active_support/cache"
require_relative "check"
require_relative "rails_cache"

wrong = ->(method:, returning:, exception:) { raise exception } # it would go unnoticed
store = ActiveSupport::Cache::RedisCacheStore.new(url: "redis://127.0.0.1:#{REDIS}/#{DB}", namespace: "redis_cache_store", error_handler: wrong)
rails_cache store

check("delete_matched") do
  3.times { |i| store.write("match:#{i}", i) }
  store.delete_matched("match:*")
  equal store.read_multi("match:0", "match:1", "match:2"), {}
end

check("clear") do
  store.write("c", 1)
  store.clear
  equal store.read("c"), nil
end
