package tollgate

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// patient is a deadline for tests that aren't about deadlines: this machine may be busy.
const patient = 20 * time.Second

var (
	redis   *Redis
	service *Service

	// Set in a process that holds a permit until it is killed.
	holder     = flag.String("holder", "", "the service's address")
	attributes = flag.String("attributes", "", "as JSON")
)

func TestMain(m *testing.M) {
	flag.Parse()
	if *holder != "" {
		hold()
	}
	if os.Getenv("TOLLGATE_SERVE") == "" {
		fmt.Fprintln(os.Stderr, "TOLLGATE_SERVE: expected the path of tollgate-serve")
		os.Exit(1)
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	redis = startRedis()
	defer redis.end()
	service = startService(redis, "127.0.0.1:0")
	defer service.end()
	return m.Run()
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// Redis is a server of these tests' own.
type Redis struct {
	folder, url string
	command     *exec.Cmd
}

func startRedis() *Redis {
	folder, err := os.MkdirTemp("", "tollgate-")
	check(err)
	path := filepath.Join(folder, "redis.sock")
	command := exec.Command("redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--dir", folder)
	check(command.Start())
	for until := time.Now().Add(patient); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(path); err == nil {
			return &Redis{folder, "unix://" + path, command}
		}
		if time.Now().After(until) {
			panic(fmt.Sprintf("redis-server made no socket within %s", patient))
		}
	}
}

func (redis *Redis) end() {
	end(redis.command)
	check(os.RemoveAll(redis.folder))
}

func end(command *exec.Cmd) {
	_ = command.Process.Kill()
	_ = command.Wait()
}

// lineOf is the next line that this command prints. A command that prints none in time is killed.
func lineOf(command *exec.Cmd, output io.Reader, about string) (string, error) {
	late := time.AfterFunc(patient, func() { _ = command.Process.Kill() })
	defer late.Stop()
	line, err := bufio.NewReader(output).ReadString('\n')
	if err != nil {
		err = fmt.Errorf("expected %s within %s, got %q: %w", about, patient, line, err)
	}
	return line, err
}

// Service is the real one.
type Service struct {
	address, url string
	command      *exec.Cmd
}

func startService(redis *Redis, at string, options ...string) *Service {
	return startServiceWith("../rules.toml", redis, at, options...)
}

func startServiceWith(rules string, redis *Redis, at string, options ...string) *Service {
	own := []string{rules, "--url", redis.url, "--http", at, "--grpc", "off", "--metrics", "off", "--deadline", "5s"}
	command := exec.Command(os.Getenv("TOLLGATE_SERVE"), append(own, options...)...)
	output, err := command.StdoutPipe()
	check(err)
	check(command.Start())
	line, err := lineOf(command, output, "the address of tollgate-serve")
	check(err)
	address := strings.TrimSpace(strings.TrimPrefix(line, "http "))
	started := &Service{address, "http://" + address, command}
	if strings.HasPrefix(at, "unix:") {
		started.url = address
	}
	return started
}

func (service *Service) end() { end(service.command) }

// answer is what the service answers to this request.
func (service *Service) answer(request []byte) []byte {
	connection, err := net.DialTimeout("tcp", service.address, patient)
	check(err)
	defer connection.Close()
	check(connection.SetDeadline(time.Now().Add(patient)))
	_, err = connection.Write(request)
	check(err)
	return message(connection)
}

// Listener accepts connections, and hands each with its number to a function.
type Listener struct {
	address, url string
	accepted     atomic.Int64
	listener     net.Listener
}

func listen(t *testing.T, serve func(connection net.Conn, number int64)) *Listener {
	return listenAt(t, "127.0.0.1:0", serve)
}

func listenAt(t *testing.T, address string, serve func(connection net.Conn, number int64)) *Listener {
	listener, err := net.Listen("tcp", address)
	check(err)
	t.Cleanup(func() { listener.Close() })
	address = listener.Addr().String()
	found := &Listener{address: address, url: "http://" + address, listener: listener}
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			number := found.accepted.Add(1)
			go func() {
				defer connection.Close()
				_ = connection.SetDeadline(time.Now().Add(2 * patient))
				serve(connection, number)
			}()
		}
	}()
	return found
}

// opOf is the call that a request is.
func opOf(request []byte) string {
	path, _, _ := strings.Cut(strings.TrimPrefix(string(request), "POST /v1/"), " ")
	return path
}

// failure is an answer that is no decision.
func failure(status int, body string) []byte {
	return []byte(fmt.Sprintf("HTTP/1.1 %d Failure\r\nContent-Length: %d\r\n\r\n%s", status, len(body), body))
}

// message is one request or answer, or empty if the other side has closed.
func message(connection net.Conn) []byte {
	var read bytes.Buffer
	reader := bufio.NewReader(io.TeeReader(connection, &read))
	length := 0
	for {
		line, err := reader.ReadString('\n')
		if err != nil {
			return nil
		}
		_, _ = fmt.Sscanf(strings.ToLower(line), "content-length: %d", &length)
		if line == "\r\n" {
			break
		}
	}
	if _, err := io.CopyN(io.Discard, reader, int64(length)); err != nil {
		return nil
	}
	return read.Bytes()
}

func open(t *testing.T, address string, options Options) *Client {
	t.Helper()
	if options.Deadline == 0 {
		options.Deadline = patient
	}
	client, err := New(address, options)
	check(err)
	t.Cleanup(client.Close)
	return client
}

// of is a request with a user of the test's own.
func of(t *testing.T, path string) Request {
	return Request{Attributes: map[string]any{"path": path, "user": t.Name()}}
}

// logged is what is logged meanwhile.
func logged(run func()) string {
	var lines bytes.Buffer
	log.SetOutput(&lines)
	defer log.SetOutput(os.Stderr)
	run()
	log.SetOutput(os.Stderr)
	return lines.String()
}

// within waits for this.
func within(t *testing.T, happens <-chan struct{}, about string) {
	t.Helper()
	select {
	case <-happens:
	case <-time.After(patient):
		t.Fatalf("expected %s within %s", about, patient)
	}
}

// logLines sends each line that is logged until the test ends.
func logLines(t *testing.T) <-chan string {
	lines := make(chan string, 100)
	log.SetOutput(writer(func(line []byte) { lines <- string(line) }))
	t.Cleanup(func() { log.SetOutput(os.Stderr) })
	return lines
}

type writer func(line []byte)

func (write writer) Write(line []byte) (int, error) {
	write(line)
	return len(line), nil
}

// assertLogged asserts that the next line ends so.
func assertLogged(t *testing.T, lines <-chan string, text string) {
	t.Helper()
	select {
	case line := <-lines:
		if !strings.HasSuffix(line, text+"\n") || strings.Contains(line, "secret") {
			t.Errorf("expected %q, got %q", text, line)
		}
	case <-time.After(patient):
		t.Fatalf("expected a line within %s: %s", patient, text)
	}
}

// assertNothingLogged asserts that nothing is logged soon.
func assertNothingLogged(t *testing.T, lines <-chan string) {
	t.Helper()
	select {
	case line := <-lines:
		t.Errorf("expected nothing, got %q", line)
	case <-time.After(200 * time.Millisecond):
	}
}

func decodeFile(name string, into any) {
	content, err := os.ReadFile(name)
	check(err)
	decoder := json.NewDecoder(bytes.NewReader(content))
	decoder.UseNumber()
	check(decoder.Decode(into))
}

func get(t *testing.T, url string, header http.Header) (*http.Response, string) {
	t.Helper()
	request, err := http.NewRequest(http.MethodGet, url, nil)
	check(err)
	for name, values := range header {
		request.Header[name] = values
	}
	response, err := (&http.Client{Timeout: patient}).Do(request)
	check(err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	check(err)
	return response, string(body)
}
