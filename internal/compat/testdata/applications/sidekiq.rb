# sidekiq.rb REDIS MEMCACHED DB: Sidekiq, with its processor of jobs in this process.
require "sidekiq"
require "sidekiq/api"
require "sidekiq/cli"
require "sidekiq/launcher"
require_relative "check"

version Sidekiq::VERSION
Sidekiq.logger.level = Logger::FATAL
Sidekiq.redis = { url: "redis://127.0.0.1:#{REDIS}/#{DB}", size: 15 }

class Note
  include Sidekiq::Worker
  sidekiq_options queue: "sidekiq", retry: 3

  DONE = Queue.new

  def perform(n)
    raise "on purpose" if n < 0

    DONE << n
  end
end

# within waits for a condition, for at most 12 s.
def within
  deadline = Process.clock_gettime(Process::CLOCK_MONOTONIC) + 12
  until (got = yield)
    raise "no such thing within 12 s" if Process.clock_gettime(Process::CLOCK_MONOTONIC) > deadline

    sleep 0.02
  end
  got
end

check("enqueue and look") do
  Sidekiq::Queue.new("sidekiq").clear
  jid = Note.perform_async(1)
  q = Sidekiq::Queue.new("sidekiq")
  equal [q.size, q.first.jid, q.first.args], [1, jid, [1]]
  equal q.find_job(jid).delete, true
  equal q.size, 0
end

check("scheduled") do
  Sidekiq::ScheduledSet.new.clear
  jid = Note.perform_in(3600, 2)
  equal Sidekiq::ScheduledSet.new.map(&:jid), [jid]
  Sidekiq::ScheduledSet.new.clear
end

launcher = Sidekiq::Launcher.new(Sidekiq.options.merge(queues: ["sidekiq"], concurrency: 2, timeout: 1, environment: "test"))
launcher.run

check("perform") do
  3.times { |i| Note.perform_async(i) }
  within { Note::DONE.size == 3 }
  equal 3.times.map { Note::DONE.pop }.sort, [0, 1, 2]
end

check("bulk") do
  Note.perform_bulk((10...20).map { |i| [i] })
  within { Note::DONE.size == 10 }
end

check("a failure goes to the retries") do
  Sidekiq::RetrySet.new.clear
  Note.perform_async(-1)
  within { Sidekiq::RetrySet.new.size == 1 }
  equal Sidekiq::RetrySet.new.first["error_message"], "on purpose"
end

launcher.quiet
launcher.stop
