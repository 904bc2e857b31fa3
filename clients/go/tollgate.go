// Package tollgate is a client of tollgate-serve, the rate limit service, by HTTP with JSON, and a middleware for
// net/http. README.md says what each call costs, and what happens if the service doesn't answer.
package tollgate

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// DefaultDeadline is the time that a call takes at most. The service gives Redis 15 ms; the rest is for the network
	// and busy processes.
	DefaultDeadline = 100 * time.Millisecond

	// The service closes a connection that is unused for 10 s, and a request that is sent meanwhile fails.
	idleTime        = 5 * time.Second
	idleConnections = 64
	mostBytes       = 1 << 20

	// The least deadline of a release that nobody waits for: one given up early would only be repeated.
	unreadDeadline = 500 * time.Millisecond
	// At most so many of a client's are retried at a time. Others are tried once.
	unreadRetried = 256
)

// The pauses between the attempts to release a permit. After the last attempt, it comes back at its ttl.
var releasePauses = []time.Duration{50 * time.Millisecond, 200 * time.Millisecond}

var (
	// The pauses between those of a release that nobody waits for, while the service is away. Each is lengthened
	// randomly, up to twice, so that callers that failed together don't retry together.
	unreadPauses = []time.Duration{
		200 * time.Millisecond, 400 * time.Millisecond, 800 * time.Millisecond, 1600 * time.Millisecond,
		2 * time.Second, 2 * time.Second, 2 * time.Second,
	}
	// A failure so long after the first one isn't retried.
	unreadPatience = 15 * time.Second
)

// OnError says what a call answers without a decision of the service.
type OnError int

const (
	// Closed returns the error.
	Closed OnError = iota
	// Open allows: the decision's By is "policy", and its Cause the error. It overrides a rule's own on_error.
	Open
)

// Options of a Client. The zero value is good.
type Options struct {
	Token    string        // Sent as Authorization: Bearer.
	Deadline time.Duration // DefaultDeadline if zero.
	OnError  OnError
	TLS      *tls.Config // For https.
}

// Client may be shared by goroutines. Connections are kept, one for each call at a time.
type Client struct {
	url       string
	token     string
	deadline  time.Duration
	onError   OnError
	http      *http.Client
	transport *http.Transport
	retried   atomic.Int64 // Releases that nobody waits for.
}

// Request says what is asked. Attributes are what rules match and count: text, numbers, true or false.
type Request struct {
	Attributes map[string]any `json:"attributes"`
	// Units to take; the rule's cost if nil. See Units.
	Cost *uint64 `json:"cost,omitempty"`
	// Units to take of single limits, by the limit's name or its cost's attribute.
	Costs map[string]uint64 `json:"costs,omitempty"`
	// A unique id: the request is charged once, however often it is sent, and can be settled or cancelled.
	ID string `json:"id,omitempty"`
	// For how long the id is remembered, in milliseconds; ten minutes if zero.
	IDTTLMillis uint64 `json:"id_ttl_ms,omitempty"`
}

// Units is a Request's Cost.
func Units(units uint64) *uint64 { return &units }

// RetryAfter is the wait until the same request would be allowed: 0 if it was.
type RetryAfter struct {
	Duration time.Duration
	Never    bool // Waiting doesn't help.
}

// UnmarshalJSON reads microseconds, null or "never".
func (after *RetryAfter) UnmarshalJSON(data []byte) error {
	if string(data) == `"never"` {
		*after = RetryAfter{Never: true}
		return nil
	}
	var micros *int64
	if err := json.Unmarshal(data, &micros); err != nil {
		return err
	}
	*after = RetryAfter{}
	if micros != nil {
		after.Duration = time.Duration(*micros) * time.Microsecond
	}
	return nil
}

// Limit is one limit's part of a decision.
type Limit struct {
	Rule             string     `json:"rule"`      // Set if several rules apply.
	Algorithm        string     `json:"algorithm"` // Such as token-bucket; empty if the service doesn't say.
	Name             string     `json:"name"`
	Key              string     `json:"key"`
	Allowed          bool       `json:"allowed"`
	Limit            uint64     `json:"limit"`
	Remaining        uint64     `json:"remaining"`
	RetryAfter       RetryAfter `json:"retry_after_us"`
	ResetAfterMicros int64      `json:"reset_after_us"`
}

// Decision is what the service decided. What is nil doesn't apply, such as Remaining where no limit was asked.
type Decision struct {
	Allowed          bool            `json:"allowed"`
	Status           int             `json:"-"` // The status to answer a denied request with, such as 429.
	Reason           string          `json:"reason"`
	Rule             string          `json:"rule"`
	Key              string          `json:"key"`
	Cost             *uint64         `json:"cost"`
	Limit            *uint64         `json:"limit"`
	Remaining        *uint64         `json:"remaining"`
	RetryAfter       RetryAfter      `json:"retry_after_us"`
	ResetAfterMicros *int64          `json:"reset_after_us"`
	DeniedBy         string          `json:"denied_by"`
	By               string          `json:"by"` // redis, rules, or policy if it was the rule's failure policy or this client's.
	Limits           []Limit         `json:"limits"`
	ID               string          `json:"id"`
	Message          string          `json:"message"`
	Error            string          `json:"error"` // The kind of the error, if a failure policy decided.
	Cause            *Unavailable    `json:"-"`     // The error, if this client's policy decided.
	Header           http.Header     `json:"-"`     // RateLimit, RateLimit-Policy and Retry-After, or those of another style.
	Raw              json.RawMessage `json:"-"`     // The whole answer.
}

// RequestError reports that the service refused the request as it is: wrong input (400), a wrong token (401), an id that
// nothing is remembered for (404), or another 4xx.
type RequestError struct {
	Message string
	Status  int
	Kind    string
	Reason  string // Tells it from others of its kind: "ambiguous-path" of a path that can be read in two ways.

	// Set if it answers a second attempt, and the first one may have been charged.
	mayBeCharged bool
}

func (err *RequestError) Error() string { return err.Message }

// IsUnknownID reports whether an error says that nothing is remembered for the id: it expired, was cancelled or released,
// or never existed.
func IsUnknownID(err error) bool {
	var refused *RequestError
	return errors.As(err, &refused) && refused.Kind == "unknown-id"
}

// Unavailable reports that there is no decision: the service is unreachable, too slow, or answered with a failure (5xx).
type Unavailable struct {
	Message string
	Kind    string // The service's, or of this client: unreachable, deadline, disconnected, garbled, unavailable.
	Charged *bool  // Whether units were taken all the same; nil: unknown.
	Err     error  // Of the connection.
}

func (err *Unavailable) Error() string { return err.Message }

// Unwrap returns the error of the connection.
func (err *Unavailable) Unwrap() error { return err.Err }

func (err *Unavailable) isUncharged() bool { return err.Charged != nil && !*err.Charged }

// Denied reports that Hold got no permit. The decision says why, and for how long.
type Denied struct{ Decision *Decision }

func (err *Denied) Error() string {
	if err.Decision.Message != "" {
		return err.Decision.Message
	}
	return "denied by rule " + err.Decision.Rule
}

// New makes a client of the service at http://HOST:PORT, https://HOST or unix:PATH.
func New(address string, options Options) (*Client, error) {
	if options.Deadline < 0 {
		return nil, fmt.Errorf("deadline: expected more than 0, got %s", options.Deadline)
	}
	if options.Deadline == 0 {
		options.Deadline = DefaultDeadline
	}
	transport := &http.Transport{
		MaxIdleConns:        idleConnections,
		MaxIdleConnsPerHost: idleConnections,
		IdleConnTimeout:     idleTime,
		TLSClientConfig:     options.TLS,
		DisableCompression:  true,
	}
	base := strings.TrimRight(address, "/")
	if path := strings.TrimPrefix(address, "unix:"); path != address && path != "" {
		if strings.HasPrefix(path, "///") {
			path = path[2:]
		}
		base = "http://localhost"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
	} else if parsed, err := url.Parse(address); err != nil || parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.Host == "" {
		return nil, fmt.Errorf("address: expected http://HOST:PORT, https://HOST or unix:PATH, got %q", address)
	}
	client := &Client{
		url: base, token: options.Token, deadline: options.Deadline, onError: options.OnError,
		http: &http.Client{Transport: transport}, transport: transport,
	}
	// A redirect would send the token, and the call, to somewhere else.
	client.http.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return client, nil
}

// Close closes the connections that are kept.
func (client *Client) Close() { client.transport.CloseIdleConnections() }

// Decide takes what the request costs, or denies it and takes nothing. One round trip.
func (client *Client) Decide(ctx context.Context, request Request) (*Decision, error) {
	return client.ask(ctx, "decide", request)
}

// Peek is what Decide would answer; it takes nothing.
func (client *Client) Peek(ctx context.Context, request Request) (*Decision, error) {
	return client.ask(ctx, "peek", request)
}

// Refund gives the cost back. With an ID of its own it is given back once, however often it is sent.
func (client *Client) Refund(ctx context.Context, request Request) (*Decision, error) {
	return client.ask(ctx, "refund", request)
}

// Settle replaces what Decide took under this ID by this cost, once. The attributes are those of that call.
func (client *Client) Settle(ctx context.Context, request Request) (*Decision, error) {
	return client.ask(ctx, "settle", request)
}

// Cancel gives back what Decide took under this id.
func (client *Client) Cancel(ctx context.Context, attributes map[string]any, id string) (*Decision, error) {
	return client.ask(ctx, "cancel", Request{Attributes: attributes, ID: id})
}

// Renew extends the permits that are held under this id to a whole ttl from now. Hold does it by itself.
func (client *Client) Renew(ctx context.Context, attributes map[string]any, id string) (*Decision, error) {
	return client.ask(ctx, "renew", Request{Attributes: attributes, ID: id})
}

// Release gives back the permits that are held under this id. Hold does it by itself.
func (client *Client) Release(ctx context.Context, attributes map[string]any, id string) (*Decision, error) {
	return client.ask(ctx, "release", Request{Attributes: attributes, ID: id})
}

// Hold takes permits, and renews them in a goroutine until release is called, which gives them back; defer it. The context
// that it returns ends with ctx, with release, and once the permit has expired, or may have, so that others may hold it.
// The error is a *Denied if there are no permits, and a *RequestError if the rule that applies has no permits, or no rule
// applies. The request's ID is replaced.
func (client *Client) Hold(ctx context.Context, request Request) (held context.Context, release func() error, err error) {
	if err := ctx.Err(); err != nil {
		// Nothing is asked, so there is nothing to give back.
		return nil, nil, err
	}
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return nil, nil, err
	}
	request.ID = hex.EncodeToString(id)
	byID := Request{Attributes: make(map[string]any, len(request.Attributes)), ID: request.ID}
	for name, value := range request.Attributes {
		byID.Attributes[name] = value
	}
	asked := time.Now()
	var isSent atomic.Bool
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { isSent.Store(true) },
	})
	decision, err := client.send(traced, "decide", request)
	if err != nil {
		var failure *Unavailable
		isUnavailable := errors.As(err, &failure)
		var refused *RequestError
		isLeftHeld := isUnavailable && client.onError == Closed && !failure.isUncharged() ||
			errors.As(err, &refused) && refused.mayBeCharged
		if ctx.Err() != nil && isSent.Load() || isLeftHeld {
			// The service may have given a permit all the same. net/http has given the call up by now, so it sends no more
			// of it. But the service isn't waited for: if it takes this release before the call, as it may when it is
			// slow, the permit comes back at its ttl.
			go client.releaseUnread(byID)
		}
		if ctx.Err() != nil || !isUnavailable {
			return nil, nil, err
		}
		if decision, err = client.byPolicy("decide", request, failure); err != nil {
			return nil, nil, err
		}
	}
	if !decision.Allowed {
		return nil, nil, &Denied{decision}
	}
	if why := decision.whyWithoutPermits(); why != "" {
		if len(decision.Limits) > 0 {
			if _, err := client.send(context.Background(), "cancel", byID); err != nil {
				log.Printf("tollgate: what Hold took of a rule without permits wasn't given back: %v", err)
			}
		}
		return nil, nil, &RequestError{Message: why, Status: http.StatusConflict, Kind: "input"}
	}
	held, end := context.WithCancel(ctx)
	released := make(chan struct{})
	go client.keep(byID, decision, asked, end, released)
	var once sync.Once
	return held, func() error {
		var err error
		once.Do(func() {
			close(released)
			end()
			// A rule that allows without limits has no permits.
			if decision.By != "rules" && (decision.Cause == nil || !decision.Cause.isUncharged()) {
				err = client.release(byID)
			}
		})
		return err
	}, nil
}

// whyWithoutPermits is why a decision that allows gave no permits, though Hold asked for them; empty if it may have, or
// needn't.
func (decision *Decision) whyWithoutPermits() string {
	// A failure policy knows no limits.
	if decision.By == "policy" {
		return ""
	}
	if decision.Reason == "no-rule" {
		var body struct {
			Shadows []json.RawMessage `json:"shadows"`
		}
		if json.Unmarshal(decision.Raw, &body) == nil && len(body.Shadows) > 0 {
			// A shadow rule is being tried, and must not stop anything.
			return ""
		}
		return "hold: no rule with permits applies to these attributes"
	}
	for _, limit := range decision.Limits {
		// A service that names no algorithm refuses the release.
		if limit.Algorithm == "" || limit.Algorithm == "concurrency" {
			return ""
		}
	}
	// Who is exempt, by a rule or a list that allows, has no limits, and needs no permit.
	if len(decision.Limits) == 0 {
		return ""
	}
	return "hold: rule " + decision.Rule +
		" has no concurrency limit: give it one, or let a rule that has one match these attributes first"
}

// keep renews until the permits are released, and calls lose if they are lost.
func (client *Client) keep(byID Request, decision *Decision, asked time.Time, lose func(), released <-chan struct{}) {
	// Other limits of the rule may begin anew earlier or later than the permit expires. A renewal answers for the permits
	// alone; until then the earliest time is right for the first renewal, and the latest for a loss.
	earliest, ttl := times(decision)
	if ttl == 0 {
		return
	}
	pause, renewed := earliest/3, asked
	for {
		timer := time.NewTimer(pause)
		select {
		case <-released:
			timer.Stop()
			return
		case <-timer.C:
		}
		asked := time.Now()
		answer, err := client.send(context.Background(), "renew", byID)
		var failure *Unavailable
		switch {
		case err == nil:
			if earliest, _ := times(answer); earliest > 0 {
				ttl = earliest
			}
			pause, renewed = ttl/3, asked
		case errors.As(err, &failure):
			if time.Since(renewed) >= ttl {
				lose()
			}
			if pause /= 3; pause < 10*time.Millisecond {
				pause = 10 * time.Millisecond
			}
		case IsUnknownID(err):
			lose()
			return
		default:
			// The rule has no permits, which the release reports.
			return
		}
	}
}

// times are the earliest and the latest at which a limit begins anew, of those that took something.
func times(decision *Decision) (earliest, latest time.Duration) {
	for _, limit := range decision.Limits {
		after := time.Duration(limit.ResetAfterMicros) * time.Microsecond
		if after > 0 && (earliest == 0 || after < earliest) {
			earliest = after
		}
		if after > latest {
			latest = after
		}
	}
	return earliest, latest
}

// release tries three times, whatever has become of the caller's context. What the service refuses is logged.
func (client *Client) release(byID Request) error {
	for attempt := 0; ; attempt++ {
		err := expectRelease(client.send(context.Background(), "release", byID))
		if !isAway(err) {
			// The work is done, and trying again wouldn't help.
			logRelease(err)
			return nil
		}
		if attempt == len(releasePauses) {
			return err
		}
		time.Sleep(releasePauses[attempt])
	}
}

// releaseUnread releases for nobody who waits: again for some seconds while the service is away. After that, the permit
// comes back at its ttl.
func (client *Client) releaseUnread(byID Request) {
	deadline := client.deadline
	if deadline < unreadDeadline {
		deadline = unreadDeadline
	}
	release := func() error {
		return expectRelease(client.sendWithin(context.Background(), deadline, "release", byID))
	}
	err := release()
	if isAway(err) {
		until := time.Now().Add(unreadPatience)
		if client.retried.Add(1) <= unreadRetried {
			for attempt := 0; isAway(err) && attempt < len(unreadPauses) && time.Now().Before(until); attempt++ {
				time.Sleep(jittered(unreadPauses[attempt]))
				err = release()
			}
		}
		client.retried.Add(-1)
	}
	logRelease(err)
}

// expectRelease is an error, too, where a failure policy answered a release: Redis was away, and nothing is known to be
// released.
func expectRelease(decision *Decision, err error) error {
	if err != nil || decision.By != "policy" {
		return err
	}
	kind := decision.Error
	if kind == "" {
		kind = "unavailable"
	}
	return &Unavailable{"the failure policy of rule " + decision.Rule + " answered, not Redis", kind, nil, nil}
}

// logRelease is for a release whose error no caller gets. An id that nothing is remembered for has no permits to give back.
func logRelease(err error) {
	if err != nil && !IsUnknownID(err) {
		log.Printf("tollgate: a permit wasn't released: %v", err)
	}
}

func isAway(err error) bool {
	var failure *Unavailable
	return errors.As(err, &failure)
}

// jittered is a pause of up to twice this. Before Go 1.20, math/rand draws the same in every process.
func jittered(pause time.Duration) time.Duration {
	more, err := rand.Int(rand.Reader, big.NewInt(int64(pause)))
	if err != nil {
		return pause
	}
	return pause + time.Duration(more.Int64())
}

func (client *Client) ask(ctx context.Context, op string, request Request) (*Decision, error) {
	decision, err := client.send(ctx, op, request)
	var failure *Unavailable
	if ctx.Err() == nil && errors.As(err, &failure) {
		return client.byPolicy(op, request, failure)
	}
	return decision, err
}

func (client *Client) byPolicy(op string, request Request, failure *Unavailable) (*Decision, error) {
	// A renewal that fails is no permission to go on: the permit may be another's by now.
	if client.onError == Closed || op == "renew" {
		return nil, failure
	}
	return &Decision{
		Allowed: true, Status: 200, Reason: "policy", By: "policy",
		ID: request.ID, Error: failure.Kind, Cause: failure, Header: http.Header{},
	}, nil
}

func (client *Client) send(ctx context.Context, op string, request Request) (*Decision, error) {
	return client.sendWithin(ctx, client.deadline, op, request)
}

func (client *Client) sendWithin(
	ctx context.Context, deadline time.Duration, op string, request Request,
) (*Decision, error) {
	if request.Attributes == nil {
		request.Attributes = map[string]any{}
	}
	body, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	within, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	response, content, err := client.exchange(ctx, within, deadline, op, body)
	var earlier *Unavailable
	// This failure is of the connection to the service; an answer, whose kinds have the same names, is never asked for
	// again. A slow service isn't asked more for being slow, and nothing is repeated that could be charged twice.
	isRepeated := errors.As(err, &earlier) && (earlier.Kind == "unreachable" || earlier.Kind == "disconnected") &&
		(op == "peek" || request.ID != "")
	if isRepeated {
		response, content, err = client.exchange(ctx, within, deadline, op, body)
	}
	var decision *Decision
	if err == nil {
		decision, err = answer(response.StatusCode, response.Header, content)
	}
	if isRepeated && earlier.Charged == nil {
		// That the second attempt took nothing doesn't tell what the first one took.
		var failure *Unavailable
		var refused *RequestError
		switch {
		case errors.As(err, &failure) && failure.isUncharged():
			failure.Charged = nil
		case errors.As(err, &refused):
			refused.mayBeCharged = true
		}
	}
	return decision, err
}

// exchange sends a request once, and reads the answer. net/http itself sends it on another connection if the one that was
// kept turns out to be closed before anything was written, and only then: POST isn't idempotent.
func (client *Client) exchange(
	ctx, within context.Context, deadline time.Duration, op string, body []byte,
) (*http.Response, []byte, error) {
	request, err := http.NewRequestWithContext(within, http.MethodPost, client.url+"/v1/"+op, bytes.NewReader(body))
	if err != nil {
		return nil, nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	if client.token != "" {
		request.Header.Set("Authorization", "Bearer "+client.token)
	}
	response, err := client.http.Do(request)
	if err != nil {
		return nil, nil, failureOf(ctx, within, deadline, err)
	}
	defer response.Body.Close()
	content, err := io.ReadAll(io.LimitReader(response.Body, mostBytes))
	if err != nil {
		return nil, nil, failureOf(ctx, within, deadline, err)
	}
	return response, content, nil
}

func failureOf(ctx, within context.Context, deadline time.Duration, err error) error {
	var dialed *net.OpError
	isDialed := errors.As(err, &dialed) && dialed.Op == "dial"
	var uncharged *bool
	if isDialed {
		uncharged = new(bool)
	}
	switch {
	case ctx.Err() != nil:
		// The caller has gone: no policy answers for it.
		return ctx.Err()
	case within.Err() != nil:
		return &Unavailable{fmt.Sprintf("no answer within %s", deadline), "deadline", uncharged, err}
	case isDialed:
		return &Unavailable{"the service can't be reached: " + err.Error(), "unreachable", uncharged, err}
	case strings.Contains(err.Error(), "malformed HTTP"):
		return &Unavailable{"the answer can't be read: " + err.Error(), "garbled", nil, err}
	default:
		return &Unavailable{"the connection broke: " + err.Error(), "disconnected", nil, err}
	}
}

// answer is the decision in an answer. A denial may have any status, so the body tells whether it is a decision.
func answer(status int, header http.Header, content []byte) (*Decision, error) {
	var body struct {
		Allowed *bool  `json:"allowed"`
		Failure string `json:"error"`
		Kind    string `json:"kind"`
		Charged *bool  `json:"charged"`
		Reason  string `json:"reason"`
	}
	isJSON := json.Unmarshal(content, &body) == nil
	if isJSON && body.Allowed != nil {
		decision := &Decision{Status: status, Header: http.Header{}, Raw: content}
		if err := json.Unmarshal(content, decision); err != nil {
			return nil, &Unavailable{"the answer is no decision: " + err.Error(), "garbled", nil, err}
		}
		for name, values := range header {
			if isForClients(name) {
				decision.Header[name] = values
			}
		}
		return decision, nil
	}
	message, kind := body.Failure, body.Kind
	if message == "" {
		message = strings.TrimSpace(string(content))
		if len(message) > 200 {
			message = message[:200]
		}
	}
	if message == "" {
		message = fmt.Sprintf("status %d", status)
	}
	isSlow := status == http.StatusRequestTimeout || status == http.StatusTooManyRequests
	switch {
	case status >= 400 && status < 500 && !isSlow:
		return nil, &RequestError{Message: message, Status: status, Kind: kind, Reason: body.Reason}
	case status < 400:
		return nil, &Unavailable{"the answer is no decision: " + message, "garbled", nil, nil}
	case kind == "":
		kind = "unavailable"
	}
	return nil, &Unavailable{message, kind, body.Charged, nil}
}

// isForClients takes a name as http.Header has it.
func isForClients(name string) bool {
	return name == "Retry-After" || strings.HasPrefix(name, "Ratelimit") || strings.HasPrefix(name, "X-Ratelimit-")
}

// Middleware decides on each request before next sees it. The attributes are ip, method and path, and what more makes of
// the request (it may be nil), such as a user; nil there removes one. A denial is answered with the decision's status.
// Without a decision, a Closed client answers 503, and a path that can be read in two ways gets 400. What else the service
// refuses to decide is answered 500: the visitor can't mend it. That, and what an Open client lets pass without a decision,
// is logged, at most once a second.
func (client *Client) Middleware(next http.Handler, more func(*http.Request) map[string]any) http.Handler {
	warnings := new(seldom)
	refuseUnfit := func(writer http.ResponseWriter, why string) {
		warnings.print("a request is answered 500, since its rate limit can't be decided: " + why)
		refuse(writer, http.StatusInternalServerError, "")
	}
	return http.HandlerFunc(func(writer http.ResponseWriter, request *http.Request) {
		// The path as it was sent: the service decodes it itself, and must not decode it twice.
		path := request.URL.EscapedPath()
		attributes := map[string]any{"method": request.Method, "path": path}
		if address, err := netip.ParseAddrPort(request.RemoteAddr); err == nil {
			attributes["ip"] = address.Addr().WithZone("").String()
		}
		if more != nil {
			for name, value := range more(request) {
				attributes[name] = value
				if value == nil {
					delete(attributes, name)
				}
			}
		}
		decision, err := client.Decide(request.Context(), Request{Attributes: attributes})
		var failure *Unavailable
		var refused *RequestError
		switch {
		case errors.As(err, &refused) && refused.Reason == "ambiguous-path" && attributes["path"] == path:
			refuse(writer, http.StatusBadRequest, "the path can be read in two ways")
			return
		case errors.As(err, &refused):
			refuseUnfit(writer, refused.withAdvice())
			return
		case errors.As(err, &failure):
			log.Printf("tollgate: no decision, so the request is refused: %v", err)
			refuse(writer, http.StatusServiceUnavailable, "rate limits can't be checked now")
			return
		case err != nil:
			log.Printf("tollgate: %v", err)
			refuse(writer, http.StatusInternalServerError, "")
			return
		// A rule's own status is meant for the visitor.
		case decision.Reason == "missing" && decision.Status == http.StatusBadRequest:
			refuseUnfit(writer, decision.whatIsMissing())
			return
		case decision.Cause != nil:
			warnings.print("requests pass without a decision: " + decision.Cause.Error())
		}
		for name, values := range decision.Header {
			writer.Header()[name] = values
		}
		if !decision.Allowed {
			refuse(writer, decision.Status, decision.Message)
			return
		}
		next.ServeHTTP(writer, request)
	})
}

// seldom logs at most once a second, so that a failure that every request meets doesn't fill the log.
type seldom struct {
	mutex sync.Mutex
	last  time.Time
}

func (warnings *seldom) print(message string) {
	warnings.mutex.Lock()
	isDue := time.Since(warnings.last) >= time.Second
	if isDue {
		warnings.last = time.Now()
	}
	warnings.mutex.Unlock()
	if isDue {
		log.Print("tollgate: " + message)
	}
}

func (err *RequestError) withAdvice() string {
	if strings.HasPrefix(err.Message, "id: it is missing") {
		return err.Message + "; let a rule with permits match an attribute that only Hold sends"
	}
	return err.Message
}

func (decision *Decision) whatIsMissing() string {
	var body struct {
		Missing string `json:"missing"`
	}
	_ = json.Unmarshal(decision.Raw, &body)
	return fmt.Sprintf("rule %s needs the attribute %s, which this request lacks: add it by the middleware's attributes, "+
		"or let the rule match only requests that have it", decision.Rule, body.Missing)
}

func refuse(writer http.ResponseWriter, status int, detail string) {
	title := http.StatusText(status)
	if title == "" {
		title = "Denied"
	}
	problem := map[string]any{"type": "about:blank", "title": title, "status": status}
	if detail != "" {
		problem["detail"] = detail
	}
	writer.Header().Set("Content-Type", "application/problem+json")
	writer.Header().Set("Cache-Control", "no-store")
	writer.WriteHeader(status)
	// A client that has gone needs no answer.
	_ = json.NewEncoder(writer).Encode(problem)
}
