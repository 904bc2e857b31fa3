package tollgate

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// The page's programs compile, as they are printed but for the address, and the first one runs under the rules of the page.
func TestTheProgramsOfThePage(t *testing.T) {
	page, err := os.ReadFile("README.md")
	check(err)
	programs := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllSubmatch(page, -1)
	if len(programs) != 2 {
		t.Fatalf("expected 2 programs, got %d", len(programs))
	}
	rules := regexp.MustCompile("(?s)```toml\n(.*?)```").FindSubmatch(page)
	if rules == nil {
		t.Fatal("expected rules")
	}
	folder, err := os.MkdirTemp(".", "readme")
	check(err)
	defer os.RemoveAll(folder)
	own := startRedis()
	defer own.end()
	file := filepath.Join(folder, "rules.toml")
	check(os.WriteFile(file, rules[1], 0o600))
	started := startServiceWith(file, own, "127.0.0.1:0")
	defer started.end()
	text := "package main\n\nimport (\n\t\"context\"\n\t\"fmt\"\n\t\"net/http\"\n\n\ttollgate \"tollgate.example/client\"\n)\n\n" +
		"func first(ctx context.Context, report func(context.Context) error) error {\n" + string(programs[0][1]) + "}\n\n" +
		"func second(client *tollgate.Client, mux http.Handler) http.Handler {\n" + string(programs[1][1]) + "return handler\n}\n\n" +
		"func main() {\n\t_ = second\n" +
		"\tfmt.Println(first(context.Background(), func(context.Context) error { fmt.Println(\"reported\"); return nil }))\n}\n"
	text = strings.Replace(text, "http://127.0.0.1:8080", started.url, 1)
	// A slow machine must not miss the deadline.
	text = strings.Replace(text, `Token: "..."`, `Token: "...", Deadline: 20e9`, 1)
	check(os.WriteFile(filepath.Join(folder, "main.go"), []byte(text), 0o600))
	program := filepath.Join(folder, "program")
	if output, err := exec.Command("go", "build", "-o", program, "./"+folder).CombinedOutput(); err != nil {
		t.Fatalf("%s", output)
	}
	command := exec.Command("./" + program)
	late := time.AfterFunc(2*patient, func() { _ = command.Process.Kill() })
	defer late.Stop()
	if output, err := command.CombinedOutput(); err != nil || string(output) != "reported\n<nil>\n" {
		t.Fatalf("%v: %s", err, output)
	}
}
