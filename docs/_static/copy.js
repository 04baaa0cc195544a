// A button on each block of code that copies it; of a console, only the commands.
document.querySelectorAll("div.highlight").forEach((block) => {
  const code = block.querySelector("pre");
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    const isConsole = block.parentElement.matches(".highlight-console, .highlight-pycon");
    const prompted = /^(\$|>>>|\.\.\.) ?/;
    const lines = code.textContent.trimEnd().split("\n");
    const kept = isConsole ? lines.filter((line) => prompted.test(line)) : lines;
    await navigator.clipboard.writeText(kept.map((line) => line.replace(isConsole ? prompted : "", "")).join("\n"));
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
  block.append(button);
});
