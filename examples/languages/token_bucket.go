// Decides by tollgate's script token_bucket, for the rule `api`, which is `token-bucket 100/1m burst 20`.
//
//	go run token_bucket.go USER COST...
//
// Needs github.com/gomodule/redigo, and token_bucket.lua in the working directory. REDIS_URL names the Redis.
package main

import (
	"fmt"
	"log"
	"net/url"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/gomodule/redigo/redis"
)

const deadline, allowedWithoutRedis = 500 * time.Millisecond, false // the time to connect, and for each answer

var rule = redis.Args{20, 1, 600_000, 1, 0} // capacity, rate, period, tick, max_debt: 1 unit per 600000 us, up to 20

// Redis decides nothing now. Any other answer is one to a mistake: a right that is missing, a wrong argument.
var away = regexp.MustCompile("^(LOADING|BUSY|MASTERDOWN|READONLY|OOM|MISCONF|NOREPLICAS|CLUSTERDOWN|TRYAGAIN) " +
	"|^ERR max number of clients ")
var form = regexp.MustCompile(`^rediss?://([^/?#@\s]*@)?(\[[\da-fA-F:]+\]|[\w.-]+)(:0*[1-9]\d{0,4})?(/\d*)?$`)

// A connection that was idle for long may have been closed, which a call would notice only after it was sent;
// and the primary may become a replica.
var pool = redis.Pool{MaxIdle: 8, IdleTimeout: 10 * time.Second, MaxConnLifetime: time.Minute, Dial: dial}

func dial() (redis.Conn, error) {
	// redigo sends nothing twice: a call may have been charged.
	return redis.DialURL(os.Getenv("REDIS_URL"), redis.DialConnectTimeout(deadline),
		redis.DialTLSHandshakeTimeout(deadline), redis.DialReadTimeout(deadline), redis.DialWriteTimeout(deadline))
}

// Whether it is allowed, how many units remain (-1: Redis doesn't decide), and the microseconds to wait (-1: for ever).
func decide(script *redis.Script, user, cost string) (allowed bool, remaining, retryAfterUs int64, err error) {
	conn := pool.Get()
	defer conn.Close()
	// Other bytes of the user than letters, digits and -_.@:/+=,~| are escaped: see lua/sharing.md.
	call := redis.Args{"tollgate:{" + user + "}:api/token-bucket-1m"}.Add(rule...).Add(cost, "acquire", -1)
	answer, err := script.Do(conn, call...) // EVALSHA; after NOSCRIPT, EVAL
	if code, ok := err.(redis.Error); ok && !away.MatchString(string(code)) {
		return false, 0, 0, err
	} else if err != nil {
		log.Print("Redis doesn't decide: ", err)
		if strings.HasPrefix(err.Error(), "READONLY ") { // the primary has become a replica: connect anew
			conn.Do("QUIT")
			conn.Receive() // the end of the connection, so that the pool doesn't keep it
		}
		return allowedWithoutRedis, -1, 0, nil
	}
	reply, err := redis.Int64s(answer, nil)
	if err != nil || len(reply) < 5 {
		return false, 0, 0, fmt.Errorf("unexpected reply: %v", answer)
	}
	return reply[0] == 1, reply[2], reply[3], nil
}

func main() {
	address := os.Getenv("REDIS_URL")
	if _, err := url.Parse(address); err != nil || !form.MatchString(address) { // the error has the password
		log.Fatal("REDIS_URL: expected redis://[user:password@]host:port[/db]")
	}
	text, err := os.ReadFile("token_bucket.lua")
	if err != nil {
		log.Fatal(err)
	}
	script, verdict := redis.NewScript(1, string(text)), map[bool]string{true: "allowed", false: "denied"}
	for _, cost := range os.Args[2:] {
		if allowed, remaining, retryAfterUs, err := decide(script, os.Args[1], cost); err != nil {
			log.Fatal(err)
		} else if remaining < 0 {
			fmt.Println(verdict[allowed], "without Redis")
		} else if retryAfterUs < 0 {
			fmt.Printf("%s: %d remaining, never\n", verdict[allowed], remaining)
		} else { // For Retry-After in whole seconds, round up.
			fmt.Printf("%s: %d remaining, retry after %.6f s\n", verdict[allowed], remaining, float64(retryAfterUs)/1e6)
		}
	}
}
