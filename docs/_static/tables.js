// A table that is wider than its page becomes one block per row, with the head of its column before each cell.
function stack() {
  for (const table of document.querySelectorAll(".content table.docutils")) {
    table.classList.remove("stacked");
    const frame = table.closest(".table-wrapper") ?? table.parentElement;
    if (frame.scrollWidth <= frame.clientWidth) continue;
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, number) => (cell.dataset.head = heads[number]));
    table.classList.add("stacked");
  }
}
addEventListener("load", stack);
addEventListener("resize", stack);
