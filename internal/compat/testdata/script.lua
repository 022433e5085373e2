return redis.call("get", "k")
