# What the scripts share: run checks in turn and say on stdout how each went, one
# line each, `ok NAME` or `fail NAME: why`, and `done` at the end.
require "timeout"

$stdout.sync = true

REDIS, MEMCACHED, DB = ARGV.map(&:to_i)

def version(text) = puts("version #{text}")

# check runs a block at once, for at most 15 s.
def check(name, &block)
  Timeout.timeout(15, &block)
  puts "ok #{name}"
rescue StandardError, NotImplementedError => err
  line = err.backtrace_locations&.find { |l| l.path == $PROGRAM_NAME }&.lineno
  puts "fail #{name}: #{err.class} #{err.message} in line #{line}".tr("\n", " ")
end

def equal(got, want)
  raise "got #{got.inspect[0, 200]}, want #{want.inspect[0, 200]}" unless got == want
end

def raises(kind)
  yield
rescue kind => err
  err.message
else
  raise "#{kind} was not raised"
end

at_exit { puts "done" if $!.nil? }
