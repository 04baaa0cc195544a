// What the site's search finds: node search.js SITE QUESTION..., one line of JSON for each question.
const fs = require("fs");
const vm = require("vm");

const [site, ...questions] = process.argv.slice(2);
const files = ["_static/searchtools.js", "_static/language_data.js", "searchindex.js"];
const page = {
  document: { getElementById: () => null },
  DOCUMENTATION_OPTIONS: {},
  SPHINX_HIGHLIGHT_ENABLED: false,
  _ready: () => {},
  _: (text) => text,
};
page.window = page;
vm.createContext(page);
for (const file of files) vm.runInContext(fs.readFileSync(`${site}/${file}`, "utf8"), page);
const search = vm.runInContext("(text) => Search._performSearch(...Search._parseQuery(text))", page);
for (const question of questions) {
  const found = search(question).reverse(); // the last is shown first
  console.log(JSON.stringify(found.map(([name, , anchor, , score]) => [name, anchor, score])));
}
