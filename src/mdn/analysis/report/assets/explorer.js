"use strict";
// The mathematics of one step on the direction of a unit key. The lines between the two marks are plain arithmetic on
// purpose: tests/analysis/test_report_page.py evaluates the same text in Python and compares it with numpy and the recurrence.

// <maths>
function pairEigenvalues(alpha, beta, mu, eta) {
  const half = (alpha + mu - alpha * beta * eta) / 2;
  const inside = half * half - alpha * mu;
  const root = Math.sqrt(Math.max(inside, 0));
  const imaginary = Math.sqrt(Math.max(-inside, 0));
  return [half + root, imaginary, half - root, -imaginary];
}
function stepWeight(weight, momentum, alpha, beta, mu, eta, value, feedback) {
  const error = value - feedback * alpha * weight;
  const after = mu * momentum - eta * error;
  return [alpha * weight - beta * after, after];
}
// </maths>

const NAMES = ["alpha", "beta", "mu", "eta"];
const STEPS = 40;
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function gates() {
  return NAMES.map((name) => Number(byId(name).value));
}

// S along the key after one write of value 1 at step 1: asked with the same key at every later step (feedback 1, values
// 0), or never again (feedback 0).
function response(feedback) {
  const [alpha, beta, mu, eta] = gates();
  let weight = 0;
  let momentum = 0;
  const values = [0];
  for (let t = 1; t <= STEPS; t += 1) {
    [weight, momentum] = stepWeight(weight, momentum, alpha, beta, mu, eta, t === 1 ? 1 : 0, feedback);
    values.push(weight);
  }
  return values;
}

function place(id, real, imaginary) {
  byId(id).setAttribute("transform", `translate(${(100 * real).toFixed(3)} ${(-100 * imaginary).toFixed(3)})`);
}

function path(values, scale) {
  const points = values.map((y, t) => `${((300 * t) / STEPS).toFixed(1)} ${(90 - 80 * y * scale).toFixed(2)}`);
  return "M" + points.join("L");
}

function complexText(real, imaginary) {
  const sign = imaginary < 0 ? "−" : "+";
  return imaginary === 0 ? real.toFixed(3) : `${real.toFixed(3)} ${sign} ${Math.abs(imaginary).toFixed(3)}i`;
}

function verdict(modulus, least) {
  const [alpha, beta, mu] = gates();
  const disc = modulus <= 1 ? "inside the unit disc" : "outside the unit disc";
  const half = least >= 0 ? "right half plane" : "left half plane: the sign flips";
  const layer = alpha + beta <= 1 ? "the layer allows these gates (α + β ≤ 1)" : "the layer's bounds exclude these gates (α + β > 1)";
  const bound = mu >= 0.125 ? "with its bounds μ ≥ 1/8 guarantees the right half plane" : "for μ < 1/8 its bounds guarantee nothing";
  return `${disc}; ${half}; ${layer}; ${bound}`;
}

function update() {
  const [alpha, beta, mu, eta] = gates();
  NAMES.forEach((name) => {
    byId(`${name}-value`).textContent = Number(byId(name).value).toFixed(3);
  });
  const [real1, imaginary1, real2, imaginary2] = pairEigenvalues(alpha, beta, mu, eta);
  place("eigenvalue-1", real1, imaginary1);
  place("eigenvalue-2", real2, imaginary2);
  place("eigenvalue-alpha", alpha, 0);
  place("eigenvalue-mu", mu, 0);
  const modulus = Math.max(Math.hypot(real1, imaginary1), Math.hypot(real2, imaginary2));
  const same = response(1);
  const other = response(0);
  const largest = Math.max(...same.map(Math.abs), ...other.map(Math.abs), 1e-9);
  byId("response-same").setAttribute("d", path(same, 1 / largest));
  byId("response-other").setAttribute("d", path(other, 1 / largest));
  byId("response-scale").textContent = `Full height: ${largest.toPrecision(3)}`;
  byId("pair-text").textContent = `${complexText(real1, imaginary1)} and ${complexText(real2, imaginary2)}`;
  byId("modulus-text").textContent = modulus.toFixed(4);
  byId("verdict-text").textContent = verdict(modulus, Math.min(real1, real2));
}

function choose(event) {
  const values = event.currentTarget.dataset.gates.split(",");
  NAMES.forEach((name, number) => {
    byId(name).value = values[number];
  });
  update();
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  byId("theme").setAttribute("aria-pressed", String(!dark));
}

function drawAxes() {
  const grid = byId("response-grid");
  for (let t = 0; t <= STEPS; t += 10) {
    const label = document.createElementNS(SVG, "text");
    label.setAttribute("x", String((300 * t) / STEPS));
    label.setAttribute("y", "188");
    label.setAttribute("text-anchor", "middle");
    label.textContent = String(t);
    grid.append(label);
  }
}

NAMES.forEach((name) => byId(name).addEventListener("input", update));
document.querySelectorAll("button[data-gates]").forEach((button) => button.addEventListener("click", choose));
byId("theme").addEventListener("click", toggleTheme);
drawAxes();
update();
