package tollgate

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
)

// The page's programs compile, as they are printed.
func TestTheProgramsOfThePageCompile(t *testing.T) {
	page, err := os.ReadFile("README.md")
	check(err)
	programs := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllSubmatch(page, -1)
	if len(programs) != 2 {
		t.Fatalf("expected 2 programs, got %d", len(programs))
	}
	folder, err := os.MkdirTemp(".", "readme")
	check(err)
	defer os.RemoveAll(folder)
	text := "package main\n\nimport (\n\t\"context\"\n\t\"fmt\"\n\t\"net/http\"\n\n\ttollgate \"tollgate.example/client\"\n)\n\n" +
		"func first(ctx context.Context, report func(context.Context) error) error {\n" + string(programs[0][1]) + "}\n\n" +
		"func second(client *tollgate.Client, mux http.Handler) http.Handler {\n" + string(programs[1][1]) + "return handler\n}\n\n" +
		"func main() { _, _ = first, second }\n"
	check(os.WriteFile(filepath.Join(folder, "main.go"), []byte(text), 0o600))
	command := exec.Command("go", "build", "-o", os.DevNull, "./"+folder)
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%s", output)
	}
}
