# mem_cache_store.rb REDIS MEMCACHED DB: Rails' cache in memcached.
require "active_support"
require "active_support/cache"
require_relative "check"
require_relative "rails_cache"

require "dalli"
Dalli.logger.level = Logger::FATAL
rails_cache ActiveSupport::Cache::MemCacheStore.new("127.0.0.1:#{MEMCACHED}", namespace: "mem_cache_store", socket_timeout: 2)
