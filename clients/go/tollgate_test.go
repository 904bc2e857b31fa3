package tollgate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var background = context.Background()

func TestSharedVectors(t *testing.T) {
	own := startRedis()
	defer own.end()
	fresh := startService(own, "127.0.0.1:0")
	defer fresh.end()
	client := open(t, fresh.url, Options{})
	var vectors []struct {
		About, Op string
		Request   json.RawMessage
		Status    int
		Answer    map[string]any
	}
	decodeFile("../vectors.json", &vectors)
	for _, vector := range vectors {
		var request Request
		check(json.Unmarshal(vector.Request, &request))
		decision, err := calls(client)[vector.Op](background, request)
		var status int
		var found any
		var refused *RequestError
		switch {
		case errors.As(err, &refused):
			if IsUnknownID(err) != (refused.Status == http.StatusNotFound) {
				t.Errorf("%s: %+v", vector.About, refused)
			}
			status, found = refused.Status, map[string]any{"error": refused.Message, "kind": refused.Kind, "charged": false}
		case err != nil:
			t.Fatalf("%s: %v", vector.About, err)
		default:
			decoder := json.NewDecoder(strings.NewReader(string(decision.Raw)))
			decoder.UseNumber()
			check(decoder.Decode(&found))
			status = decision.Status
		}
		if status != vector.Status {
			t.Errorf("%s: expected status %d, got %d: %v", vector.About, vector.Status, status, found)
		}
		assertHas(t, vector.About, found, vector.Answer)
	}
	if len(vectors) == 0 {
		t.Fatal("no vectors")
	}
}

// calls are those of a client by their names in the service.
func calls(client *Client) map[string]func(context.Context, Request) (*Decision, error) {
	type call = func(context.Context, Request) (*Decision, error)
	byID := func(call func(context.Context, map[string]any, string) (*Decision, error)) call {
		return func(ctx context.Context, request Request) (*Decision, error) {
			return call(ctx, request.Attributes, request.ID)
		}
	}
	return map[string]call{
		"decide": client.Decide, "peek": client.Peek, "refund": client.Refund, "settle": client.Settle,
		"cancel": byID(client.Cancel), "renew": byID(client.Renew), "release": byID(client.Release),
	}
}

func assertHas(t *testing.T, about string, found, expected any) {
	t.Helper()
	switch expected := expected.(type) {
	case map[string]any:
		fields, _ := found.(map[string]any)
		for name, value := range expected {
			at, ok := fields[name]
			if !ok {
				t.Errorf("%s: %s is missing", about, name)
			}
			assertHas(t, about+": "+name, at, value)
		}
	case []any:
		items, _ := found.([]any)
		if len(items) != len(expected) {
			t.Fatalf("%s: expected %d, got %v", about, len(expected), found)
		}
		for at, value := range expected {
			assertHas(t, fmt.Sprint(about, " ", at), items[at], value)
		}
	default:
		if found != expected {
			t.Errorf("%s: expected %v, got %v", about, expected, found)
		}
	}
}

func TestFiftyCallersAtOnceAreAllowedExactlyTheLimit(t *testing.T) {
	client := open(t, service.url, Options{})
	var allowed atomic.Int64
	var callers sync.WaitGroup
	for caller := 0; caller < 50; caller++ {
		callers.Add(1)
		go func() {
			defer callers.Done()
			for turn := 0; turn < 2; turn++ {
				decision, err := client.Decide(background, of(t, "/requests"))
				if err != nil {
					t.Error(err)
				} else if decision.Allowed {
					allowed.Add(1)
				}
			}
		}()
	}
	callers.Wait()
	if allowed.Load() != 10 {
		t.Errorf("expected 10, got %d", allowed.Load())
	}
}

func TestADecisionIsTyped(t *testing.T) {
	client := open(t, service.url, Options{})
	request := of(t, "/logins")
	request.Attributes["method"] = "POST"
	var denied *Decision
	for turn := 0; turn < 3; turn++ {
		var err error
		denied, err = client.Decide(background, request)
		check(err)
	}
	if denied.Allowed || denied.Status != 429 || denied.Message != "too many attempts" || *denied.Limit != 2 ||
		denied.RetryAfter.Duration < 29*24*time.Hour || denied.RetryAfter.Never || denied.Limits[0].Allowed {
		t.Errorf("%+v", denied)
	}
	if algorithm := denied.Limits[0].Algorithm; algorithm != "" && algorithm != "sliding-log" {
		t.Error(algorithm)
	}
	if len(denied.Header) != 3 || denied.Header.Get("Retry-After") == "" || denied.Header.Get("RateLimit") == "" {
		t.Error(denied.Header)
	}
	never, err := client.Decide(background, Request{Attributes: of(t, "/requests").Attributes, Cost: Units(11)})
	if err != nil || !never.RetryAfter.Never {
		t.Error(never, err)
	}
}

func TestSettleCancelAndRefundGiveBackWhatTheySay(t *testing.T) {
	client := open(t, service.url, Options{})
	request := func(cost uint64, id string) Request {
		return Request{Attributes: of(t, "/requests").Attributes, Cost: Units(cost), ID: id}
	}
	remains := func(expected uint64) func(*Decision, error) {
		return func(decision *Decision, err error) {
			t.Helper()
			check(err)
			if *decision.Remaining != expected {
				t.Errorf("expected %d, got %d", expected, *decision.Remaining)
			}
		}
	}
	remains(2)(client.Decide(background, request(8, "a")))
	remains(7)(client.Settle(background, request(3, "a")))
	remains(2)(client.Decide(background, request(5, "b")))
	remains(7)(client.Cancel(background, request(0, "").Attributes, "b"))
	remains(8)(client.Refund(background, request(1, "")))
	if _, err := client.Cancel(background, request(0, "").Attributes, "b"); !IsUnknownID(err) {
		t.Error(err)
	}
}

func TestOneOfManyHoldsAnExclusivePermit(t *testing.T) {
	client := open(t, service.url, Options{})
	var inside, held atomic.Int64
	var callers sync.WaitGroup
	for caller := 0; caller < 20; caller++ {
		callers.Add(1)
		go func() {
			defer callers.Done()
			for turn := 0; turn < 5; turn++ {
				_, release, err := client.Hold(background, of(t, "/exclusive"))
				var denied *Denied
				if errors.As(err, &denied) {
					continue
				}
				if err != nil {
					t.Error(err)
					continue
				}
				held.Add(1)
				if inside.Add(1) != 1 {
					t.Error("two hold it")
				}
				time.Sleep(10 * time.Millisecond)
				inside.Add(-1)
				check(release())
			}
		}()
	}
	callers.Wait()
	if held.Load() == 0 {
		t.Error("nobody held it")
	}
	_, release, err := client.Hold(background, of(t, "/exclusive"))
	check(err)
	check(release())
}

func TestAPermitIsReleasedOnAPanic(t *testing.T) {
	client := open(t, service.url, Options{})
	work := func() (recovered any) {
		defer func() { recovered = recover() }()
		request := of(t, "/jobs")
		request.Cost = Units(2)
		held, release, err := client.Hold(background, request)
		check(err)
		defer func() {
			check(release())
			if held.Err() == nil {
				t.Error("the context goes on")
			}
		}()
		var denied *Denied
		if _, _, err := client.Hold(background, of(t, "/jobs")); !errors.As(err, &denied) || denied.Decision.Status != 429 {
			t.Error(err)
		}
		panic("work")
	}
	for turn := 0; turn < 2; turn++ {
		if recovered := work(); recovered != "work" {
			t.Error(recovered)
		}
	}
}

// hold is the process that is killed.
func hold() {
	client, err := New(*holder, Options{Deadline: patient})
	check(err)
	request := Request{}
	check(json.Unmarshal([]byte(*attributes), &request.Attributes))
	_, _, err = client.Hold(background, request)
	check(err)
	fmt.Println("held")
	time.Sleep(10 * time.Minute)
}

func TestAPermitIsRenewedAndThatOfAKilledHolderComesBack(t *testing.T) {
	client := open(t, service.url, Options{})
	var both sync.WaitGroup
	for _, path := range []string{"/exclusive", "/mixed"} {
		request := of(t, path)
		both.Add(1)
		go func() {
			defer both.Done()
			asJSON, err := json.Marshal(request.Attributes)
			check(err)
			holder := exec.Command(os.Args[0], "-holder", service.url, "-attributes", string(asJSON))
			output, err := holder.StdoutPipe()
			check(err)
			check(holder.Start())
			if line, err := lineOf(holder, output, "the line of a holder"); err != nil || line != "held\n" {
				t.Errorf("%q: %v", line, err)
			}
			time.Sleep(2500 * time.Millisecond) // the ttl is 2 s
			var denied *Denied
			if _, _, err := client.Hold(background, request); !errors.As(err, &denied) {
				t.Error(err)
			}
			end(holder)
			for until := time.Now().Add(patient); ; time.Sleep(50 * time.Millisecond) {
				_, release, err := client.Hold(background, request)
				if err == nil {
					check(release())
					return
				}
				if !errors.As(err, &denied) || time.Now().After(until) {
					t.Error(err)
					return
				}
			}
		}()
	}
	both.Wait()
}

func TestALostPermitEndsItsContext(t *testing.T) {
	client := open(t, service.url, Options{})
	request := of(t, "/jobs")
	// By hand, since Hold keeps its id to itself.
	request.ID = "lost"
	decision, err := client.Decide(background, request)
	check(err)
	decision.Limits[0].ResetAfterMicros = 30_000
	_, err = client.Release(background, request.Attributes, request.ID)
	check(err)
	held, lose := context.WithCancel(background)
	client.keep(request, decision, time.Now(), lose, make(chan struct{}))
	if held.Err() == nil {
		t.Error("expected an end")
	}
}

func TestHoldOfARuleWithoutPermits(t *testing.T) {
	client := open(t, service.url, Options{})
	_, release, err := client.Hold(background, of(t, "/free"))
	check(err)
	check(release())
	var refused *RequestError
	_, _, err = client.Hold(background, of(t, "/requests"))
	if !errors.As(err, &refused) || refused.Status != 409 || refused.Kind != "input" ||
		!strings.HasPrefix(refused.Message, "hold: rule requests has no concurrency limit: ") {
		t.Error(err)
	}
	request := of(t, "/requests")
	request.Cost = Units(0)
	decision, err := client.Decide(background, request)
	check(err)
	if *decision.Remaining != 10 {
		t.Errorf("expected that what was taken is given back, and %d remain", *decision.Remaining)
	}
}

func TestHoldWhereNoRuleApplies(t *testing.T) {
	client := open(t, service.url, Options{})
	logged := logged(func() {
		_, _, err := client.Hold(background, of(t, "/nowhere"))
		if err == nil || err.Error() != "hold: no rule with permits applies to these attributes" {
			t.Error(err)
		}
		// A rule on trial stops nothing.
		_, release, err := client.Hold(background, of(t, "/tried"))
		check(err)
		check(release())
	})
	if logged != "" {
		t.Error(logged)
	}
}

func TestHoldGoesOnWherePermitsMayBeHeld(t *testing.T) {
	for about, change := range map[string]func(body map[string]any){
		"an older service": func(body map[string]any) { delete(body["limits"].([]any)[0].(map[string]any), "algorithm") },
		"a failure policy": func(body map[string]any) { body["by"] = "policy" },
		"a failure policy without limits": func(body map[string]any) {
			body["by"], body["reason"], body["limits"] = "policy", "no-rule", []any{}
		},
	} {
		change := change
		var ops []string
		listener := listen(t, func(connection net.Conn, _ int64) {
			for request := message(connection); request != nil; request = message(connection) {
				op := opOf(request)
				ops = append(ops, op)
				answer := service.answer(request)
				if op == "decide" {
					_, content, _ := strings.Cut(string(answer), "\r\n\r\n")
					var body map[string]any
					check(json.Unmarshal([]byte(content), &body))
					change(body)
					changed, err := json.Marshal(body)
					check(err)
					answer = failure(200, string(changed))
				}
				_, _ = connection.Write(answer)
			}
		})
		_, release, err := open(t, listener.url, Options{}).Hold(background, of(t, "/requests"))
		if err != nil {
			t.Errorf("%s: %v", about, err)
			continue
		}
		logged := logged(func() { check(release()) })
		if !strings.Contains(logged, "tollgate: a permit wasn't released: release: expected a concurrency limit") {
			t.Errorf("%s: %q", about, logged)
		}
		if found := strings.Join(ops, " "); found != "decide release" {
			t.Errorf("%s: %s", about, found)
		}
	}
}

func TestWhatHoldCannotGiveBackIsLogged(t *testing.T) {
	listener := listen(t, func(connection net.Conn, _ int64) {
		for request := message(connection); request != nil; request = message(connection) {
			answer := failure(401, `{"error": "expected a token"}`)
			if opOf(request) != "cancel" {
				answer = service.answer(request)
			}
			_, _ = connection.Write(answer)
		}
	})
	client := open(t, listener.url, Options{Token: "secret"})
	logged := logged(func() {
		if _, _, err := client.Hold(background, of(t, "/requests")); err == nil || !strings.HasPrefix(err.Error(), "hold: rule") {
			t.Error(err)
		}
	})
	if !strings.HasSuffix(logged, "what Hold took of a rule without permits wasn't given back: expected a token\n") {
		t.Errorf("%q", logged)
	}
}

func isUnavailable(t *testing.T, err error, kind string, isUncharged bool) {
	t.Helper()
	var failure *Unavailable
	if !errors.As(err, &failure) || failure.Kind != kind || failure.isUncharged() != isUncharged {
		t.Errorf("expected %s, got %#v", kind, err)
	}
}

func TestWhileTheServiceIsAwayClosedFailsAndOpenAllows(t *testing.T) {
	gone := startService(redis, "127.0.0.1:0")
	gone.end()
	client := open(t, gone.url, Options{})
	_, err := client.Decide(background, of(t, "/requests"))
	isUnavailable(t, err, "unreachable", true)
	_, _, err = client.Hold(background, of(t, "/jobs"))
	isUnavailable(t, err, "unreachable", true)
	client = open(t, gone.url, Options{OnError: Open})
	decision, err := client.Decide(background, of(t, "/requests"))
	if err != nil || !decision.Allowed || decision.By != "policy" || decision.Error != "unreachable" || decision.Cause == nil {
		t.Error(decision, err)
	}
	if _, err := client.Settle(background, Request{Attributes: of(t, "/requests").Attributes, ID: "x"}); err != nil {
		t.Error(err)
	}
	_, release, err := client.Hold(background, of(t, "/jobs"))
	check(err)
	check(release())
	_, err = client.Renew(background, of(t, "/jobs").Attributes, "x")
	isUnavailable(t, err, "unreachable", true)
}

func TestWhileRedisIsAwayTheServiceFailsAndTheClientDecides(t *testing.T) {
	own := startRedis()
	up := startService(own, "127.0.0.1:0")
	defer up.end()
	own.end()
	var failure *Unavailable
	if _, err := open(t, up.url, Options{}).Decide(background, of(t, "/requests")); !errors.As(err, &failure) {
		t.Error(err)
	}
	decision, err := open(t, up.url, Options{OnError: Open}).Decide(background, of(t, "/requests"))
	if err != nil || decision.By != "policy" {
		t.Error(decision, err)
	}
}

func TestAServiceThatSwallowsBytesIsGivenUpAtTheDeadline(t *testing.T) {
	listener := listen(t, func(net.Conn, int64) { time.Sleep(time.Minute) })
	began := time.Now()
	request := of(t, "/requests")
	request.ID = "x"
	_, err := open(t, listener.url, Options{Deadline: 300 * time.Millisecond}).Decide(background, request)
	isUnavailable(t, err, "deadline", false)
	if taken := time.Since(began); taken < 290*time.Millisecond || taken > 5*time.Second {
		t.Error(taken)
	}
	client := open(t, listener.url, Options{Deadline: 300 * time.Millisecond, OnError: Open})
	decision, err := client.Decide(background, of(t, "/requests"))
	if err != nil || decision.Error != "deadline" {
		t.Error(decision, err)
	}
	if listener.accepted.Load() != 2 {
		t.Error("a slow call was repeated")
	}
	cancelled, cancel := context.WithCancel(background)
	cancel()
	if _, err := client.Decide(cancelled, of(t, "/requests")); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestAnAnswerInDropsIsGivenUpAtTheDeadline(t *testing.T) {
	listener := listen(t, func(connection net.Conn, _ int64) {
		message(connection)
		_, err := connection.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"))
		for ; err == nil; time.Sleep(50 * time.Millisecond) {
			_, err = connection.Write([]byte(" "))
		}
	})
	began := time.Now()
	_, err := open(t, listener.url, Options{Deadline: 500 * time.Millisecond}).Decide(background, of(t, "/requests"))
	isUnavailable(t, err, "deadline", false)
	if time.Since(began) > 10*time.Second {
		t.Error(time.Since(began))
	}
}

func TestALateAnswerIsNeverThatOfAnotherCall(t *testing.T) {
	listener := listen(t, func(connection net.Conn, number int64) {
		for {
			request := message(connection)
			if request == nil {
				return
			}
			answer := service.answer(request)
			if number == 1 {
				time.Sleep(1500 * time.Millisecond)
			}
			if _, err := connection.Write(answer); err != nil {
				return
			}
		}
	})
	client := open(t, listener.url, Options{Deadline: time.Second})
	_, err := client.Decide(background, of(t, "/requests"))
	isUnavailable(t, err, "deadline", false)
	for user := 0; user < 20; user++ {
		name := "late " + strconv.Itoa(user)
		decision, err := client.Decide(background, Request{Attributes: map[string]any{"path": "/requests", "user": name}})
		if err != nil {
			isUnavailable(t, err, "deadline", false) // this machine was busy
		} else if decision.Key != "user:"+name {
			t.Error(decision.Key)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func TestABrokenConnectionRepeatsOnlyWhatIsChargedOnce(t *testing.T) {
	listener := listen(t, func(connection net.Conn, _ int64) { message(connection) })
	client := open(t, listener.url, Options{})
	request := of(t, "/requests")
	_, err := client.Decide(background, request)
	isUnavailable(t, err, "disconnected", false)
	if listener.accepted.Load() != 1 {
		t.Error(listener.accepted.Load())
	}
	request.ID = "x"
	_, err = client.Decide(background, request)
	isUnavailable(t, err, "disconnected", false)
	if listener.accepted.Load() != 3 {
		t.Error(listener.accepted.Load())
	}
	_, err = client.Peek(background, of(t, "/requests"))
	isUnavailable(t, err, "disconnected", false)
	if listener.accepted.Load() != 5 {
		t.Error(listener.accepted.Load())
	}
}

func TestAnAnswerIsNotAskedForAgain(t *testing.T) {
	request := of(t, "/requests")
	request.ID = "x"
	// The service's own connection failed, to Redis: its kinds have the names of the client's.
	for _, kind := range []string{"unreachable", "disconnected"} {
		body := fmt.Sprintf(`{"error": "no connection to redis", "kind": %q, "charged": false}`, kind)
		var requests atomic.Int64
		server := httptest.NewServer(http.HandlerFunc(func(writer http.ResponseWriter, _ *http.Request) {
			requests.Add(1)
			writer.WriteHeader(http.StatusServiceUnavailable)
			_, _ = writer.Write([]byte(body))
		}))
		t.Cleanup(server.Close)
		for op, call := range calls(open(t, server.URL, Options{})) {
			before := requests.Load()
			_, err := call(background, request)
			isUnavailable(t, err, kind, true)
			if sent := requests.Load() - before; sent != 1 {
				t.Errorf("%s, answered with %s: expected 1 request, got %d", op, kind, sent)
			}
		}
	}
}

func TestARepeatedCallIsChargedOnce(t *testing.T) {
	listener := listen(t, func(connection net.Conn, number int64) {
		answer := service.answer(message(connection))
		if number > 1 {
			_, _ = connection.Write(answer)
		}
	})
	request := of(t, "/requests")
	request.ID = "repeated"
	decision, err := open(t, listener.url, Options{}).Decide(background, request)
	if err != nil || *decision.Remaining != 9 {
		t.Error(decision, err)
	}
}

func TestWhatABrokenAttemptTookStaysUnknownIfTheSecondIsRefused(t *testing.T) {
	breaking := func() *Listener {
		itself := make(chan *Listener, 1)
		broken := listen(t, func(connection net.Conn, _ int64) {
			message(connection)
			(<-itself).listener.Close()
		})
		itself <- broken
		return broken
	}
	request := of(t, "/requests")
	request.ID = "x"
	_, err := open(t, breaking().url, Options{}).Decide(background, request)
	isUnavailable(t, err, "unreachable", false)

	listener := breaking()
	_, release, err := open(t, listener.url, Options{OnError: Open}).Hold(background, of(t, "/jobs"))
	check(err)
	// The service is there again.
	var released atomic.Int64
	listenAt(t, listener.address, func(connection net.Conn, _ int64) {
		request := message(connection)
		if opOf(request) == "release" {
			released.Add(1)
		}
		_, _ = connection.Write(service.answer(request))
	})
	check(release())
	if released.Load() != 1 {
		t.Errorf("expected 1 release, got %d", released.Load())
	}
}

func TestWhatABrokenAttemptTookStaysUnknownIfTheSecondFails(t *testing.T) {
	released := make(chan struct{}, 1)
	listener := listen(t, func(connection net.Conn, number int64) {
		for request := message(connection); request != nil; request = message(connection) {
			switch {
			case number == 1:
				// The service gave a permit, and its answer is lost.
				service.answer(request)
				return
			case opOf(request) == "decide":
				body := `{"error": "overloaded", "kind": "overloaded", "charged": false}`
				_, _ = connection.Write(failure(503, body))
			default:
				_, _ = connection.Write(service.answer(request))
				released <- struct{}{}
			}
		}
	})
	request := of(t, "/jobs")
	request.Cost = Units(2)
	_, _, err := open(t, listener.url, Options{}).Hold(background, request)
	isUnavailable(t, err, "overloaded", false)
	within(t, released, "a release")
	decision, err := open(t, service.url, Options{}).Peek(background, request)
	if err != nil || !decision.Allowed {
		t.Error(decision, err)
	}
}

func TestAnErrorOfAReleaseThatNobodyWaitsForIsLogged(t *testing.T) {
	for answer, text := range map[string]string{
		string(failure(401, `{"error": "expected a token"}`)): "tollgate: a permit wasn't released: expected a token",
		// No permits were given.
		string(failure(404, `{"error": "no rule applies to these attributes", "kind": "unknown-id"}`)): "",
	} {
		answer, text := answer, text
		released := make(chan struct{}, 1)
		listener := listen(t, func(connection net.Conn, _ int64) {
			for request := message(connection); request != nil; request = message(connection) {
				switch opOf(request) {
				case "decide":
					_, _ = connection.Write(failure(503, `{"error": "overloaded"}`))
				case "release":
					_, _ = connection.Write([]byte(answer))
					released <- struct{}{}
				default:
					_, _ = connection.Write(service.answer(request))
				}
			}
		})
		lines := logLines(t)
		client := open(t, listener.url, Options{Token: "secret"})
		_, _, err := client.Hold(background, of(t, "/jobs"))
		isUnavailable(t, err, "unavailable", false)
		within(t, released, "a release")
		if text != "" {
			assertLogged(t, lines, text)
		}
		assertNothingLogged(t, lines)
		if _, err := client.Peek(background, of(t, "/jobs")); err != nil {
			t.Error(err)
		}
	}
}

func TestWhatABrokenAttemptTookIsReleasedIfTheSecondIsRefused(t *testing.T) {
	for _, onError := range []OnError{Closed, Open} {
		released := make(chan struct{}, 1)
		listener := listen(t, func(connection net.Conn, number int64) {
			for request := message(connection); request != nil; request = message(connection) {
				switch {
				case number == 1:
					// The service gave a permit, and its answer is lost.
					service.answer(request)
					return
				case opOf(request) == "decide":
					_, _ = connection.Write(failure(401, `{"error": "expected a token"}`))
				default:
					_, _ = connection.Write(service.answer(request))
					released <- struct{}{}
				}
			}
		})
		request := of(t, "/jobs")
		request.Attributes["on_error"] = int(onError)
		request.Cost = Units(2)
		_, _, err := open(t, listener.url, Options{OnError: onError}).Hold(background, request)
		var refused *RequestError
		if !errors.As(err, &refused) || refused.Status != 401 {
			t.Error(err)
		}
		within(t, released, "a release")
		decision, err := open(t, service.url, Options{}).Peek(background, request)
		if err != nil || !decision.Allowed {
			t.Error(decision, err)
		}
	}
}

func TestWhatTheServiceRefusesAtOnceIsNotReleased(t *testing.T) {
	var requests atomic.Int64
	listener := listen(t, func(connection net.Conn, _ int64) {
		for request := message(connection); request != nil; request = message(connection) {
			requests.Add(1)
			_, _ = connection.Write(failure(401, `{"error": "expected a token"}`))
		}
	})
	client := open(t, listener.url, Options{})
	if _, _, err := client.Hold(background, of(t, "/jobs")); err == nil {
		t.Error("expected an error")
	}
	ended, end := context.WithCancel(background)
	end()
	if _, _, err := client.Hold(ended, of(t, "/jobs")); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	time.Sleep(200 * time.Millisecond)
	if requests.Load() != 1 {
		t.Errorf("expected 1 request, got %d", requests.Load())
	}
}

func TestAReleaseThatNobodyWaitsForOutlastsAnOutage(t *testing.T) {
	var releases atomic.Int64
	taken := make(chan time.Duration, 1)
	released := make(chan struct{}, 1)
	listener := listen(t, func(connection net.Conn, _ int64) {
		for request := message(connection); request != nil; request = message(connection) {
			answer := failure(503, `{"error": "overloaded"}`)
			if opOf(request) == "decide" {
				// The service gave a permit, and nobody knows.
				service.answer(request)
			} else {
				switch releases.Add(1) {
				case 1:
					began := time.Now()
					_, _ = connection.Read(make([]byte, 1))
					taken <- time.Since(began)
					return
				case 4:
					answer = service.answer(request)
					released <- struct{}{}
				}
			}
			_, _ = connection.Write(answer)
		}
	})
	lines := logLines(t)
	request := of(t, "/jobs")
	request.Cost = Units(2)
	_, _, err := open(t, listener.url, Options{Deadline: 150 * time.Millisecond}).Hold(background, request)
	var failure *Unavailable
	if !errors.As(err, &failure) {
		t.Error(err)
	}
	within(t, released, "a release")
	decision, err := open(t, service.url, Options{}).Peek(background, request)
	if err != nil || !decision.Allowed {
		t.Error(decision, err)
	}
	if taken := <-taken; taken < 300*time.Millisecond {
		t.Errorf("a short deadline is that of the caller alone, and it was %s", taken)
	}
	assertNothingLogged(t, lines)
}

func TestACancelledHoldThatReachedNobodyReleasesNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	var dials atomic.Int64
	client := open(t, service.url, Options{})
	client.http.Transport.(*http.Transport).DialContext = func(context.Context, string, string) (net.Conn, error) {
		dials.Add(1)
		cancel()
		return nil, &net.OpError{Op: "dial", Err: context.Canceled}
	}
	if _, _, err := client.Hold(ctx, of(t, "/jobs")); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	time.Sleep(50 * time.Millisecond)
	if dials.Load() != 1 {
		t.Errorf("expected 1 attempt, got %d", dials.Load())
	}
}

// failing answers every call with 503, and counts releases.
func failing(t *testing.T) (url string, releases *atomic.Int64) {
	releases = new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(writer http.ResponseWriter, request *http.Request) {
		if request.URL.Path == "/v1/release" {
			releases.Add(1)
		}
		writer.WriteHeader(http.StatusServiceUnavailable)
		_, _ = writer.Write([]byte(`{"error": "overloaded"}`))
	}))
	t.Cleanup(server.Close)
	return server.URL, releases
}

// setUnread sets the pauses and the patience of releases that nobody waits for until the test ends.
func setUnread(t *testing.T, pauses []time.Duration, patience time.Duration) {
	oldPauses, oldPatience := unreadPauses, unreadPatience
	unreadPauses, unreadPatience = pauses, patience
	t.Cleanup(func() { unreadPauses, unreadPatience = oldPauses, oldPatience })
}

func TestAReleaseThatNobodyWaitsForIsGivenUpAfterSomeAttemptsOrSomeTime(t *testing.T) {
	soon := []time.Duration{time.Millisecond, time.Millisecond, time.Millisecond}
	for attempts, patience := range map[int64]time.Duration{4: patient, 1: -1} {
		setUnread(t, soon, patience)
		url, releases := failing(t)
		lines := logLines(t)
		_, _, err := open(t, url, Options{}).Hold(background, of(t, "/jobs"))
		isUnavailable(t, err, "unavailable", false)
		assertLogged(t, lines, "tollgate: a permit wasn't released: overloaded")
		assertNothingLogged(t, lines)
		if releases.Load() != attempts {
			t.Errorf("expected %d attempts, got %d", attempts, releases.Load())
		}
	}
}

func TestAnUnknownIDIsNoNewsToTheReleaseOfAHold(t *testing.T) {
	lines := logLines(t)
	listener := listen(t, func(connection net.Conn, _ int64) {
		for asked := message(connection); asked != nil; asked = message(connection) {
			answer := failure(404, `{"error": "no rule applies to these attributes", "kind": "unknown-id"}`)
			if opOf(asked) == "decide" {
				answer = service.answer(asked)
			}
			_, _ = connection.Write(answer)
		}
	})
	_, release, err := open(t, listener.url, Options{}).Hold(background, of(t, "/jobs"))
	check(err)
	check(release())
	assertNothingLogged(t, lines)
}

func TestAFailurePolicysAnswerReleasesNothing(t *testing.T) {
	var isFailing atomic.Bool
	var releases atomic.Int64
	listener := listen(t, func(connection net.Conn, _ int64) {
		for request := message(connection); request != nil; request = message(connection) {
			answer := failure(200, `{"allowed": true, "by": "policy", "reason": "policy", "rule": "jobs", "limits": []}`)
			if opOf(request) == "release" {
				releases.Add(1)
			} else if answer = failure(503, `{"error": "overloaded"}`); !isFailing.Load() {
				answer = service.answer(request)
			}
			_, _ = connection.Write(answer)
		}
	})
	client := open(t, listener.url, Options{})
	_, release, err := client.Hold(background, of(t, "/jobs"))
	check(err)
	isUnavailable(t, release(), "unavailable", false)
	if found := releases.Swap(0); found != 3 {
		t.Errorf("expected 3 attempts, got %d", found)
	}
	isFailing.Store(true)
	setUnread(t, []time.Duration{time.Millisecond}, patient)
	lines := logLines(t)
	_, _, err = client.Hold(background, of(t, "/jobs"))
	isUnavailable(t, err, "unavailable", false)
	assertLogged(t, lines, "tollgate: a permit wasn't released: the failure policy of rule jobs answered, not Redis")
	if found := releases.Load(); found != 2 {
		t.Errorf("expected 2 attempts, got %d", found)
	}
}

func TestAtMost256ReleasesAreRetriedAtATime(t *testing.T) {
	// Those that are retried wait for longer than this process runs.
	setUnread(t, []time.Duration{time.Hour}, patient)
	url, releases := failing(t)
	lines := logLines(t)
	client := open(t, url, Options{})
	var callers sync.WaitGroup
	for caller := 0; caller < 260; caller++ {
		callers.Add(1)
		go func() {
			defer callers.Done()
			_, _, err := client.Hold(background, of(t, "/jobs"))
			isUnavailable(t, err, "unavailable", false)
		}()
	}
	callers.Wait()
	for given := 0; given < 4; given++ {
		assertLogged(t, lines, "tollgate: a permit wasn't released: overloaded")
	}
	assertNothingLogged(t, lines)
	if releases.Load() != 260 {
		t.Errorf("expected 260 releases, got %d", releases.Load())
	}
}

func TestPausesOfReleasesThatNobodyWaitsForGrowAndDiffer(t *testing.T) {
	for at, pause := range unreadPauses {
		if at > 0 && pause < unreadPauses[at-1] {
			t.Error(unreadPauses)
		}
		one, other := jittered(pause), jittered(pause)
		if one < pause || one > 2*pause || one == other {
			t.Error(pause, one, other)
		}
	}
}

func TestAConnectionIsKeptAndReplacedIfItWasClosedWhileUnused(t *testing.T) {
	for _, isKept := range []bool{true, false} {
		isKept := isKept
		listener := listen(t, func(connection net.Conn, _ int64) {
			for {
				request := message(connection)
				if request == nil {
					return
				}
				if _, err := connection.Write(service.answer(request)); err != nil || !isKept {
					return
				}
			}
		})
		client := open(t, listener.url, Options{})
		for turn := 0; turn < 3; turn++ {
			if _, err := client.Decide(background, of(t, "/requests")); err != nil {
				t.Error(err)
			}
			time.Sleep(100 * time.Millisecond)
		}
		if accepted := listener.accepted.Load(); (accepted == 1) != isKept {
			t.Error(isKept, accepted)
		}
	}
}

func TestGarbageIsNoDecision(t *testing.T) {
	for _, answer := range []string{
		"what?\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "HTTP/1.1 502 Bad\r\n\r\n",
	} {
		answer := answer
		listener := listen(t, func(connection net.Conn, _ int64) {
			message(connection)
			_, _ = connection.Write([]byte(answer))
		})
		var failure *Unavailable
		if _, err := open(t, listener.url, Options{}).Decide(background, of(t, "/requests")); !errors.As(err, &failure) {
			t.Error(answer, err)
		}
	}
}

func TestWrongInputIsReturnedWithTheServicesMessage(t *testing.T) {
	for _, onError := range []OnError{Closed, Open} {
		request := of(t, "/requests")
		request.Costs = map[string]uint64{"x": 1}
		_, err := open(t, service.url, Options{OnError: onError}).Decide(background, request)
		var refused *RequestError
		if !errors.As(err, &refused) || refused.Status != 409 || refused.Kind != "input" ||
			!strings.HasPrefix(err.Error(), "costs: expected limits of rule requests") {
			t.Error(err)
		}
	}
}

func TestAToken(t *testing.T) {
	path := filepath.Join(redis.folder, "tokens")
	check(os.WriteFile(path, []byte("secret\n"), 0o600))
	guarded := startService(redis, "127.0.0.1:0", "--tokens", path)
	defer guarded.end()
	if _, err := open(t, guarded.url, Options{Token: "secret"}).Decide(background, of(t, "/requests")); err != nil {
		t.Error(err)
	}
	for _, token := range []string{"", "wrong"} {
		_, err := open(t, guarded.url, Options{Token: token, OnError: Open}).Decide(background, of(t, "/requests"))
		var refused *RequestError
		if !errors.As(err, &refused) || refused.Status != 401 || !strings.Contains(err.Error(), "token") {
			t.Error(err)
		}
	}
}

func TestAUnixSocketAndARestart(t *testing.T) {
	path := "unix:" + filepath.Join(redis.folder, "serve.sock")
	client := open(t, path, Options{})
	for _, remaining := range []uint64{9, 8} {
		up := startService(redis, path)
		decision, err := client.Decide(background, of(t, "/requests"))
		if err != nil || *decision.Remaining != remaining {
			t.Error(decision, err)
		}
		up.end()
	}
}

func TestWrongSettings(t *testing.T) {
	for _, address := range []string{"127.0.0.1:8080", "ftp://x", "unix:", ""} {
		if _, err := New(address, Options{}); err == nil {
			t.Errorf("expected an error for %q", address)
		}
	}
	if _, err := New(service.url, Options{Deadline: -1}); err == nil {
		t.Error("expected an error")
	}
}

func serve(t *testing.T, client *Client, attributes map[string]any) string {
	hello := http.HandlerFunc(func(writer http.ResponseWriter, _ *http.Request) { _, _ = writer.Write([]byte("hello")) })
	more := func(*http.Request) map[string]any {
		if attributes == nil {
			return map[string]any{"user": t.Name()}
		}
		return attributes
	}
	server := httptest.NewServer(client.Middleware(hello, more))
	t.Cleanup(server.Close)
	return server.URL
}

func TestMiddleware(t *testing.T) {
	client := open(t, service.url, Options{})
	url := serve(t, client, nil)
	for _, remaining := range []string{"1", "0"} {
		response, body := get(t, url+"/pages/a", nil)
		if response.StatusCode != 200 || body != "hello" ||
			response.Header.Get("RateLimit-Policy") != `"pages";q=2;w=2592000` ||
			!strings.HasPrefix(response.Header.Get("RateLimit"), `"pages";r=`+remaining) {
			t.Error(response, body)
		}
	}
	response, body := get(t, url+"/pages/b?query", nil)
	var problem struct {
		Title, Detail string
		Status        int
	}
	check(json.Unmarshal([]byte(body), &problem))
	seconds, _ := strconv.Atoi(response.Header.Get("Retry-After"))
	if response.StatusCode != 429 || seconds < 29*86_400 || problem.Detail != "slow down" || problem.Status != 429 {
		t.Error(response, body)
	}
	// Decoded once, %25 is a percent sign, and this is no page.
	if response, _ := get(t, url+"/pages%252Fa", nil); response.Header.Get("RateLimit") != "" {
		t.Error(response)
	}
	if response, _ := get(t, url+"/pages%2Fa", nil); response.StatusCode != 429 {
		t.Error(response)
	}
	if response, _ := get(t, serve(t, client, map[string]any{"path": "/banned"})+"/pages/a", nil); response.StatusCode != 403 {
		t.Error(response)
	}
	if response, _ := get(t, serve(t, client, map[string]any{"ip": "nowhere"})+"/pages/a", nil); response.StatusCode != 500 {
		t.Error(response)
	}
}

func TestMiddlewareWithoutADecision(t *testing.T) {
	gone := startService(redis, "127.0.0.1:0")
	gone.end()
	for onError, status := range map[OnError]int{Closed: 503, Open: 200} {
		response, _ := get(t, serve(t, open(t, gone.url, Options{OnError: onError}), nil)+"/pages/a", nil)
		if response.StatusCode != status {
			t.Errorf("expected %d, got %d", status, response.StatusCode)
		}
	}
}

// assertSeldomLogged asserts that many requests are answered so, and that there is one such line a second, without the
// token.
func assertSeldomLogged(t *testing.T, url string, status int, text string) {
	t.Helper()
	began := time.Now()
	logged := logged(func() {
		for turn := 0; turn < 20; turn++ {
			if response, _ := get(t, url, nil); response.StatusCode != status {
				t.Errorf("expected %d, got %d", status, response.StatusCode)
			}
		}
	})
	lines := strings.Split(strings.TrimSpace(logged), "\n")
	if most := 1 + int(time.Since(began)/time.Second); len(lines) > most {
		t.Errorf("expected at most %d lines, got %q", most, lines)
	}
	for _, line := range lines {
		if !strings.Contains(line, text) || strings.Contains(line, "secret") {
			t.Errorf("expected %q, got %q", text, line)
		}
	}
}

func TestWhatTheServiceRefusesToDecideIs500(t *testing.T) {
	client := open(t, service.url, Options{Token: "secret"})
	assertSeldomLogged(t, serve(t, client, nil)+"/jobs", 500,
		"tollgate: a request is answered 500, since its rate limit can't be decided: id: it is missing: rule jobs has permits, "+
			"which are held and released by it; let a rule with permits match an attribute that only Hold sends")
	assertSeldomLogged(t, serve(t, client, map[string]any{})+"/requests", 500,
		": rule requests needs the attribute user, which this request lacks: add it by the middleware's attributes")
	assertSeldomLogged(t, serve(t, client, map[string]any{"ip": "nowhere"})+"/pages/a", 500, ": ip: expected an address such as")
}

func TestAWrongTokenIs500(t *testing.T) {
	path := filepath.Join(redis.folder, "other-tokens")
	check(os.WriteFile(path, []byte("another\n"), 0o600))
	guarded := startService(redis, "127.0.0.1:0", "--tokens", path)
	defer guarded.end()
	client := open(t, guarded.url, Options{Token: "secret"})
	assertSeldomLogged(t, serve(t, client, nil)+"/pages/a", 500, ": the token is missing or wrong")
}

func TestAPathThatCanBeReadInTwoWaysIs400UnlessTheApplicationMadeIt(t *testing.T) {
	rules := filepath.Join(t.TempDir(), "rules.toml")
	check(os.WriteFile(rules, []byte("[[rule]]\nname = \"admin\"\nmatch = { path = \"/admin/*\" }\naction = \"block\"\n"), 0o600))
	strict := startServiceWith(rules, redis, "127.0.0.1:0")
	defer strict.end()
	client := open(t, strict.url, Options{})
	logged := logged(func() {
		if response, _ := get(t, serve(t, client, nil)+"/..;/admin", nil); response.StatusCode != 400 {
			t.Error(response)
		}
		own := map[string]any{"path": "/..;/admin"}
		if response, _ := get(t, serve(t, client, own)+"/", nil); response.StatusCode != 500 {
			t.Error(response)
		}
	})
	if strings.Count(logged, "\n") != 1 || !strings.Contains(logged, "path: servers may read it in different ways") {
		t.Error(logged)
	}
}

func TestAStatusOfTheRuleIsForTheVisitor(t *testing.T) {
	url := serve(t, open(t, service.url, Options{}), nil)
	logged := logged(func() {
		if response, _ := get(t, url+"/keys", nil); response.StatusCode != 401 {
			t.Error(response)
		}
	})
	if logged != "" {
		t.Error(logged)
	}
}

func TestRequestsThatPassWithoutADecisionAreLogged(t *testing.T) {
	gone := startService(redis, "127.0.0.1:0")
	gone.end()
	url := serve(t, open(t, gone.url, Options{Token: "secret", OnError: Open}), nil)
	text := "tollgate: requests pass without a decision: the service can't be reached: "
	for turn := 0; turn < 2; turn++ {
		assertSeldomLogged(t, url, 200, text)
		time.Sleep(1100 * time.Millisecond)
	}
}
